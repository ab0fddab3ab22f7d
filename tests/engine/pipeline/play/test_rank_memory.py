"""Bytes by rank: what a rank allocates is its until it is freed, whichever way the ranks are run."""

from __future__ import annotations

import torch

from explorer.engine.device.device import CpuDevice
from explorer.engine.pipeline.play.rank_memory import MemoryWatch
from explorer.engine.pipeline.run import run_pipeline
from explorer.record.pipeline_run import ActionTime
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import SOME


def test_replay_and_one_process_measure_the_same_memory() -> None:
    plan = spec("language", LANGUAGE, 3, SOME, schedule="1F1B", arguments={"width": 64, "length": 32})
    together, alone = run_pipeline(plan), run_pipeline(plan, "replay")
    assert [m.peak_bytes for m in together.memory] == [m.peak_bytes for m in alone.memory]
    assert [m.peak_action for m in together.memory] == [m.peak_action for m in alone.memory]


def test_memory_is_complete() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, schedule="GPipe", arguments={"width": 64, "length": 32}))
    for memory in run.memory:
        assert memory.origin == "measured"
        assert memory.peak_bytes is not None
        assert memory.peak_bytes > memory.parameter_bytes + memory.receive_bytes
        assert memory.peak_action == f"{memory.rank}B0"
        assert list(memory.time_ns) == sorted(memory.time_ns)
        # Parameters, gradients and receive buffers are what is left, and sends that torch still holds.
        assert memory.held_bytes[-1] >= 2 * memory.parameter_bytes + memory.receive_bytes
    whole = 4 * 64 * 32 * 8
    assert [memory.receive_bytes for memory in run.memory] == [whole, 2 * whole, whole]


def test_an_allocation_is_its_ranks_whoever_frees_it() -> None:
    watch = MemoryWatch(CpuDevice())
    with watch:
        with watch.doing(0, "0F0"):
            mine = torch.empty(1000, dtype=torch.uint8)
        with watch.doing(1, "1F0"):
            other = torch.empty(300, dtype=torch.uint8)
            del mine
        with watch.doing(2, "outside actions"):
            """What the watch allocates for itself belongs to neither."""
    clock = (
        ActionTime(rank=0, stage=0, kind="F", microbatch=0, start_ms=0.0, end_ms=1.0),
        ActionTime(rank=1, stage=1, kind="F", microbatch=0, start_ms=1.0, end_ms=2.0),
    )
    first, second = watch.ranks({0: 50, 1: 7}, {1: 5}, clock)
    assert (first.peak_bytes, first.held_bytes[-1], first.peak_action) == (1050, 50, "0F0")
    assert (second.peak_bytes, second.held_bytes[-1], second.receive_bytes) == (307, 307, 5)
    assert max(first.time_ns) <= 1_000_000 <= max(second.time_ns) and other.numel() == 300
