"""Real ranks over gloo, in processes like those of torchrun: the same bits and the same bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from torch.distributed.pipelining import PipelineStage

from explorer.pipeline.plan.actions import format_rows
from explorer.pipeline.plan.clock import transfers
from explorer.pipeline.plan.schedules import one_f_one_b
from explorer.pipeline.view.headline import figures
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from tests.pipeline.engine.pipeline_nets import LANGUAGE, TRANSPOSED, UNET
from tests.pipeline.engine.pipeline_runs import SOME, assert_split_is_exact, ran, ran_by_ranks, spec

ROOMY = {"width": 64, "length": 64, "batch": 8}


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "n_stages"), [("1F1B", 3), ("ZBVZeroBubble", 4)])
def test_real_ranks_give_the_same_bits_and_bytes(schedule: str, n_stages: int, tmp_path: Path) -> None:
    """One stage a rank and several; test_in_process.py plays every schedule."""
    plan = spec("language", LANGUAGE, n_stages, SOME, schedule=schedule, arguments=ROOMY)
    real, alone = ran_by_ranks(plan, tmp_path), ran(plan)
    assert_split_is_exact(real)
    assert real.losses == alone.losses
    for one, other in zip(real.memory, alone.memory, strict=True):
        assert abs(one.peak_bytes - other.peak_bytes) <= 0.01 * one.peak_bytes
        assert one.peak_action == other.peak_action
    assert {b.fqn: b.n_recompute for b in real.blocks} == {b.fqn: b.n_recompute for b in alone.blocks}


@pytest.mark.slow
def test_batch_norm_and_skips_cross_processes(tmp_path: Path) -> None:
    plan = spec("unet", UNET, 3, Policy.recompute(["up"]), schedule="1F1B")
    assert_split_is_exact(ran_by_ranks(plan, tmp_path))


@pytest.mark.slow
def test_integers_cross_processes(tmp_path: Path) -> None:
    integers = ran_by_ranks(spec("transposed", TRANSPOSED, 3, n_microbatches=2), tmp_path)
    if hasattr(PipelineStage, "_get_grad_send_meta"):
        assert_split_is_exact(integers)
    else:  # torch 2.11 would wait for the gradient of integers
        assert integers.failure is not None and integers.failure.kind == "not on this device"


@pytest.mark.slow
def test_an_own_action_list_runs_on_real_ranks_and_a_rank_without_a_stage_waits(tmp_path: Path) -> None:
    rows = format_rows(one_f_one_b(3, 4))
    own = (rows[0], ("1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"), rows[2], ())
    run = ran_by_ranks(spec("language", LANGUAGE, 3, schedule="1F1B", actions=own), tmp_path)
    assert_split_is_exact(run)
    assert [memory.rank for memory in run.memory] == [0, 1, 2, 3]


LINK_MS, NAP_MS = 150.0, 50.0
FAR = f"""
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

send = schedules._batch_p2p


def slowly(ops, desc=None):
    if any(op.op is dist.isend for op in ops):
        time.sleep({LINK_MS} / 1e3)
    return send(ops, desc)


class Nap(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        time.sleep({NAP_MS} / 1e3)
        return self.after(y)


def far():
    if dist.is_initialized():  # in a rank
        schedules._batch_p2p = slowly
    return nn.Sequential(Nap(), Nap()), (torch.randn(4, 4), torch.randn(4, 4)), nn.MSELoss()
"""


@pytest.mark.slow
def test_a_slow_link_is_in_the_step_and_one_clock_reads_actions_and_their_reruns(tmp_path: Path) -> None:
    """One microbatch there and back over a link that takes its time: nothing else happens meanwhile.

    A block that sleeps takes wall time and no CPU time, in its recompute too.
    """
    (tmp_path / "net.py").write_text(FAR)
    plan = spec("far", ("0", "1"), 2, Policy.recompute(["0", "1"]), n_microbatches=1)
    plan = msgspec.structs.replace(plan, model=ModelRef(target=f"{tmp_path / 'net.py'}:far"))
    run = ran_by_ranks(plan, tmp_path)
    assert_split_is_exact(run)
    assert run.timing is run.wall
    assert run.wall.makespan_ms >= run.composed.makespan_ms + 2 * LINK_MS
    assert {(wait.source, wait.target) for wait in transfers(run.wall) if wait.wait_ms >= LINK_MS} == {(0, 1), (1, 0)}
    reruns = [(time.recompute_ms, time.duration_ms) for time in run.actions if time.kind == "B"]
    assert len(reruns) == 2 and all(NAP_MS <= rerun_ms <= action_ms for rerun_ms, action_ms in reruns)
    step = figures(run, None, plan.plan, before=None)[0]
    assert step.value in (
        f"{run.wall.makespan_ms:,.1f} ms",
        f"{run.wall.makespan_ms / 1000:.2f} s",
    )  # below a second or not
    assert run.headlines()["makespan_ms"] == run.wall.makespan_ms
    assert f"The step took {run.wall.makespan_ms:.1f} ms by the ranks' own clocks" in " ".join(run.notes)
