"""Real ranks over gloo: the same bits, the same bytes, and an end that names the guilty one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from torch.distributed.pipelining import PipelineStage

from explorer.child_process.forks import at_hand
from explorer.engine.device import subprocess_call
from explorer.engine.pipeline import processes
from explorer.engine.pipeline.processes import WAITING
from explorer.engine.pipeline.rank import write_report
from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import Cancelled
from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.clock import transfers
from explorer.plan.pipeline.schedules import one_f_one_b
from explorer.record.graph import ModelRef
from explorer.record.pipeline import RankReport
from explorer.record.plan import Progress
from explorer.record.policy import Policy
from explorer.view.pipeline.headline import figures
from tests.engine.pipeline.pipeline_nets import LANGUAGE, TRANSPOSED, TROUBLE, UNET
from tests.engine.pipeline.pipeline_runs import SOME, assert_split_is_exact, ran, spec
from tests.forked import forked, server_of

ROOMY = {"width": 64, "length": 64, "batch": 8}


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "n_stages"), [("1F1B", 3), ("ZBVZeroBubble", 4)])
def test_real_ranks_give_the_same_bits_and_bytes(schedule: str, n_stages: int) -> None:
    """One stage a rank and several; test_in_process.py plays every schedule."""
    plan = spec("language", LANGUAGE, n_stages, SOME, schedule=schedule, arguments=ROOMY)
    real, alone = run_pipeline(plan, "procs"), ran(plan)
    assert_split_is_exact(real)
    assert real.losses == alone.losses
    for one, other in zip(real.memory, alone.memory, strict=True):
        assert abs(one.peak_bytes - other.peak_bytes) <= 0.01 * one.peak_bytes
        assert one.peak_action == other.peak_action
    assert {b.fqn: b.n_recompute for b in real.blocks} == {b.fqn: b.n_recompute for b in alone.blocks}
    assert not forked()


@pytest.mark.slow
def test_batch_norm_skips_and_integers_cross_processes() -> None:
    assert_split_is_exact(run_pipeline(spec("unet", UNET, 3, Policy.recompute(["up"]), schedule="1F1B"), "procs"))
    integers = run_pipeline(spec("transposed", TRANSPOSED, 3, n_microbatches=2), "procs")
    if hasattr(PipelineStage, "_get_grad_send_meta"):
        assert_split_is_exact(integers)
    else:  # torch 2.11 would wait for the gradient of integers
        assert integers.failure is not None and integers.failure.kind == "not on this device"


@pytest.mark.slow
def test_an_own_action_list_runs_on_real_ranks_and_a_rank_without_a_stage_waits() -> None:
    rows = format_rows(one_f_one_b(3, 4))
    own = (rows[0], ("1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"), rows[2], ())
    run = run_pipeline(spec("language", LANGUAGE, 3, schedule="1F1B", actions=own), "procs")
    assert_split_is_exact(run)
    assert [memory.rank for memory in run.memory] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("die", "crash", "Rank 1 ended with exit code 1"),
        ("raise", "model raised", "Rank 1 failed in 1F"),
        ("sleep", "time-out", "Rank 1 was still at work"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_others_are_stopped(
    how: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulses: list[memoryview] = []
    shared = processes._pulses

    def now() -> float:
        """The limit is over once rank 1 alone is inside an action: there it sleeps, and the others wait for it."""
        return 1e9 if pulses and [pulse != WAITING for pulse in pulses[0]] == [False, True, False] else 0.0

    if how == "sleep":
        monkeypatch.setattr(subprocess_call, "time", SimpleNamespace(monotonic=now))
        monkeypatch.setattr(processes, "_pulses", lambda *where: (pulses.append(shared(*where)), pulses[-1])[1])
    run = run_pipeline(spec("trouble", TROUBLE, 3, arguments={"how": how}, n_microbatches=2), "procs")
    assert (run.failure.kind, run.failed_rank) == (kind, 1)
    assert words in run.failure.sentence
    assert not forked()


@pytest.mark.slow
def test_cancel_leaves_nobody_behind() -> None:
    seen: set[int] = set()

    def report(progress: Progress) -> None:
        seen.update(forked())
        if len(seen) == 3:
            raise Cancelled("The run was cancelled.")

    with pytest.raises(Cancelled):
        run_pipeline(spec("trouble", TROUBLE, 3, arguments={"how": "sleep"}, n_microbatches=2), "procs", report)
    assert len(seen) == 3
    assert not forked()


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "words"), [("rank", "was ended by SIGKILL"), ("server", "fork server")])
def test_an_end_from_outside_is_a_crash_and_not_lack_of_memory(whom: str, words: str, tmp_path: Path) -> None:
    killed: list[int] = []

    def report(progress: Progress) -> None:
        if not killed and len(forked()) == 3:
            rank = max(forked())
            killed.append(rank if whom == "rank" else server_of(rank))
            os.kill(killed[0], signal.SIGKILL)

    plan = spec("trouble", TROUBLE, 3, arguments={"how": "sleep"}, n_microbatches=2)
    run = run_pipeline(msgspec.structs.replace(plan, time_limit_s=60.0), "procs", report)
    assert (run.failure.kind, words in run.failure.sentence) == ("crash", True), run.failure
    assert not forked()


@pytest.mark.parametrize("reported", [(), (0,), (1,), (0, 1)])
def test_a_rank_that_is_killed_is_not_the_models_fault_whatever_it_has_reported(
    reported: tuple[int, ...], tmp_path: Path
) -> None:
    ranks = [at_hand().start(function) for function in (os.getpid, signal.pause)]
    ranks[1].kill()
    for rank in reported:
        write_report(RankReport(rank=rank), tmp_path)
    for process in ranks:
        process.wait()
    rank, failure = processes.guilty(ranks, processes.reports_in(tmp_path), None)
    assert (rank, failure.kind, failure.sentence) == (1, "crash", "Rank 1 was ended by SIGKILL.")
    for process in ranks:
        process.close()


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
    run = run_pipeline(plan, "procs")
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
