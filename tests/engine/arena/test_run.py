"""The whole arena on a tiny model: who chose what, each in a process of its own, equal policies once."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.arena import run
from explorer.engine.arena.run import run_arena
from explorer.errors import BadInput, Cancelled
from explorer.plan.arena.rival import Rival
from explorer.record import RunSpec
from explorer.record.arena import Arena, Bout, Ground
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.measurement import Environment
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.times import Samples
from tests.engine.tiny_nets import ref

SPEC = RunSpec(model=ref("gpt", depth=4, batch=16, length=64), n_repeats=2)


@pytest.mark.slow
def test_everybody_is_foreseen_measured_and_judged() -> None:
    progresses: list[Progress] = []
    arena = run_arena(
        SPEC,
        (0.01, 0.8),
        ("keep-all", "recompute-all", "every-k", "greedy", "explorer", "ckptplan"),
        report=progresses.append,
    )
    assert from_msgpack(to_msgpack(arena), Arena) == arena
    rows = {(bout.rival, bout.share): bout for bout in arena.bouts}
    assert len(rows) == len(arena.bouts) == 2 + 4 * 2
    assert rows["keep-all", None].step_peak_bytes == pytest.approx(arena.ground.peak_bytes, rel=0.01)
    for name in ("every-k", "greedy", "explorer"):
        bout = rows[name, 0.8]
        assert bout.fits and bout.verdict == "bitwise equal"
        assert len(bout.step.ms) == len(bout.baseline_step.ms) == SPEC.n_repeats
        assert bout.baseline_step == rows["keep-all", None].step, "all took turns with one step that keeps everything"
        assert bout.predicted_peak_bytes == pytest.approx(bout.step_peak_bytes, rel=0.01)
        impossible = rows[name, 0.01]
        assert not impossible.ran and impossible.why and impossible.policy is None
    assert "CUDA" in rows["ckptplan", 0.8].why
    assert rows["keep-all", None].policy == KEEP_ALL
    assert any(" at 80 %" in progress.what for progress in progresses)


def test_a_cancel_ends_it() -> None:
    def cancel(progress: Progress) -> None:
        if "Recompute all" in progress.what:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        run_arena(SPEC, (0.5,), ("recompute-all",), report=cancel)


def test_unknown_rivals_are_refused_before_anything_runs() -> None:
    with pytest.raises(BadInput, match="no rival"):
        run_arena(RunSpec(model=ref("nowhere")), (0.5,), ("nobody",))


def arena(*bouts: Bout) -> Arena:
    environment = Environment(
        device="cpu",
        device_name="",
        torch_version="",
        python_version="",
        platform="",
        n_threads=1,
        total_memory_bytes=1,
    )
    ground = Ground(peak_bytes=100, saved_bytes=80, is_measured=True)
    return Arena(spec=SPEC, environment=environment, ground=ground, bouts=bouts)


def bout(name: str, ratio: float, peak: int = 40, **fields: object) -> Bout:
    given = {"verdict": "bitwise equal", "policy": Policy.recompute([name]), "share": 0.5, "budget_bytes": 50, **fields}
    step, kept = (Samples(ms=tuple(ms + i for i in range(8))) for ms in (100 * ratio, 100.0))
    return Bout(rival=name, step_peak_bytes=peak, step=step, baseline_step=kept, time_ratio=ratio, **given)  # type: ignore[arg-type]


def test_only_a_rival_that_keeps_the_budget_and_the_gradients_beats_anybody() -> None:
    ours = bout("explorer", 1.30)
    for other, wins in (
        (bout("greedy", 1.20), True),
        (bout("greedy", 1.20, peak=60), False),  # over the budget
        (bout("greedy", 1.20, verdict="different"), False),
        (bout("greedy", 1.20, share=0.7, budget_bytes=70), False),  # another budget
        (bout("keep-all", 1.0, share=None, budget_bytes=None), True),
        (bout("greedy", 1.20, policy=ours.policy), False),  # the same policy, timed twice
    ):
        assert bool(arena(ours, other).beaten("explorer")) == wins, other
    missed = bout("explorer", 1.0, peak=60)
    assert arena(missed, bout("greedy", 1.5)).beaten("explorer")


def test_whoever_is_over_the_budget_is_asked_once_more_and_a_policy_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Policy.recompute(["blocks.0"]), Policy.recompute(["blocks.0", "blocks.1"])
    ran: list[Policy | None] = []

    def rival(least: float) -> Rival:
        """Thinks that two blocks are needed below that share of the peak."""
        return Rival(
            title="",
            source="",
            place=0,
            choose=lambda situation, budget: one if budget > least * situation.keep_all_bytes else two,
        )

    def fought(spec: RunSpec, ground: Ground, bout: Bout, *, report: Report) -> Bout:
        ran.append(bout.policy)
        peak = 0.95 if bout.policy == one else 0.75
        return msgspec.structs.replace(bout, step_peak_bytes=int(peak * ground.peak_bytes))

    monkeypatch.setattr(run, "_fought", fought)
    monkeypatch.setattr(run, "chosen", lambda only: {"stubborn": rival(0.0), "first": rival(0.85), "next": rival(0.87)})
    spec = RunSpec(model=ref("gpt"), n_repeats=0)
    bouts = {bout.rival: bout for bout in run_arena(spec, (0.9,)).bouts}
    assert (bouts["stubborn"].policy, bouts["stubborn"].fits) == (one, False)
    assert all((bouts[name].policy, bouts[name].fits) == (two, True) for name in ("first", "next"))
    assert ran == [one, two]


def test_steps_in_turns_may_take_as_long_as_the_bouts_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def apart(*_: object, limit_s: float, **__: object) -> object:
        limits.append(limit_s)
        return (Samples(ms=(1.0, 2.0)),) * 3

    monkeypatch.setattr(run, "apart", apart)
    bouts = [bout("first", 1.1), bout("again", 1.1, policy=Policy.recompute(["first"])), bout("second", 1.2)]
    timed = run._timed(SPEC, bouts, silent)
    assert limits == [3 * SPEC.time_limit_s] and all(one.time_ratio == 1 for one in timed)
