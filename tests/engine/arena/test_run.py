"""The whole arena on a tiny model: who chose what, each in a process of its own, equal policies once."""

from __future__ import annotations

import pytest

from explorer.engine.arena.run import run_arena
from explorer.errors import BadInput, Cancelled
from explorer.record import RunSpec
from explorer.record.arena import Arena, Bout, Ground
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.measurement import Environment
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress
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
