"""What one real rank says of itself: one clock for actions, recompute and the links between ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from explorer.engine.pipeline.run import run_pipeline
from explorer.plan.pipeline.transfers import links
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.view.pipeline.headline import figures
from tests.engine.pipeline.pipeline_nets import NAPPING
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import assert_split_is_exact


@pytest.mark.slow
def test_one_clock_reads_actions_and_what_they_recompute() -> None:
    """A block that waits takes wall time and no CPU time: its recompute is as long as its forward."""
    run = run_pipeline(spec("napping", NAPPING, 2, Policy.recompute(NAPPING), schedule="1F1B"), "procs")
    assert run.failure is None
    forward = {time.microbatch: time.duration_ms for time in run.actions if (time.stage, time.kind) == (1, "F")}
    for time in run.actions:
        if (time.stage, time.kind) == (1, "B"):
            assert forward[time.microbatch] / 2 < time.recompute_ms <= time.duration_ms


NAP_MS = 150.0


FAR = f"""
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

send = schedules._batch_p2p


def slowly(ops, desc=None):
    if any(op.op is dist.isend for op in ops):
        time.sleep({NAP_MS} / 1e3)
    return send(ops, desc)


def far():
    if dist.is_initialized():  # in a rank
        schedules._batch_p2p = slowly
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(4, 4), torch.randn(4, 4)), nn.MSELoss()
"""


@pytest.mark.slow
def test_what_a_slow_link_costs_is_in_the_step(tmp_path: Path) -> None:
    """One microbatch there and back over a link that takes its time: nothing else happens meanwhile."""
    (tmp_path / "net.py").write_text(FAR)
    plan = spec("far", ("0", "1"), 2, n_microbatches=1)
    plan = msgspec.structs.replace(plan, model=ModelRef(target=f"{tmp_path / 'net.py'}:far"))
    run = run_pipeline(plan, "procs")
    assert_split_is_exact(run)
    assert run.timing is run.wall is not None
    assert run.composed is not None
    assert run.wall.makespan_ms >= run.composed.makespan_ms + 2 * NAP_MS
    assert {(link.source, link.target) for link in links(run.wall) if link.wait_ms >= NAP_MS} == {(0, 1), (1, 0)}
    step = figures(run, None, plan.plan, before=None)[0]
    assert step.value == f"{run.wall.makespan_ms:,.1f} ms"
    assert run.headlines()["makespan_ms"] == run.wall.makespan_ms
    assert f"The step took {run.wall.makespan_ms:.1f} ms by the ranks' own clocks" in " ".join(run.notes)
