"""Runs of a pipeline derive their figures."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.pipeline.record.step import ActionTime, GradientShares, PipelineRun, PlayedSchedule, RankMemory, RankUse
from explorer.record import GradientDiff, ModelRef, RunSpec
from tests.view.builders import HOST

MEMORY = RankMemory.of(
    1, "measured", [(0, 10, ""), (5, 40, "1F0"), (7, 40, "1B0"), (9, 12, "")], parameter_bytes=10, receive_bytes=2
)


def test_the_peak_of_a_rank_is_its_first_highest_sample() -> None:
    assert (MEMORY.peak_bytes, MEMORY.peak_action, MEMORY.actions) == (40, "1F0", ("1F0", "1B0"))
    assert list(MEMORY.action) == [-1, 0, 1, -1]
    assert replace(MEMORY, optimizer_bytes=5).device_bytes == 45
    nothing = RankMemory.of(0, "measured", [], parameter_bytes=0, receive_bytes=0)
    assert (nothing.peak_bytes, nothing.device_bytes, nothing.peak_action) == (None, None, "")


def test_a_played_schedule_is_as_long_as_its_last_action_and_as_idle_as_its_ranks() -> None:
    action = ActionTime(rank=0, stage=2, kind="B", microbatch=3, start_ms=1.0, end_ms=4.5)
    uses = tuple(RankUse(rank=k, busy_ms=1.0, bubble_fraction=f, n_in_flight=1) for k, f in enumerate((0.2, 0.4)))
    played = PlayedSchedule(origin="simulated", actions=(action,), ranks=uses)
    assert (action.name, action.duration_ms) == ("2B3", 3.5)
    assert (played.makespan_ms, played.bubble_fraction) == (4.5, pytest.approx(0.3))
    assert PlayedSchedule(origin="simulated", actions=(), ranks=()).makespan_ms == 0.0


def shares(name: str, verdict: str) -> GradientShares:
    equal = GradientDiff(name=name, shape=(2,), dtype="float32", presence="both", bitwise=True)
    errors = {"bitwise equal": None, "rounding": 1e-7, "different": 1.0}
    split = replace(equal, bitwise=verdict == "bitwise equal", baseline_error=1e-7, candidate_error=errors[verdict])
    assert split.verdict == verdict
    return GradientShares(name=name, stages=(0,), microbatching=equal, recompute=equal, splitting=split)


def test_gradients_are_counted_by_what_splitting_did() -> None:
    run = PipelineRun(
        spec=RunSpec(model=ModelRef(target="a.py")), engine="inproc", environment=HOST, rows=(), memory=(MEMORY,),
        gradients=tuple(shares(*one) for one in (("a", "bitwise equal"), ("b", "rounding"), ("c", "different"))),
    )  # fmt: skip
    headlines = run.headlines()
    assert [headlines[f"n_splitting_{word}"] for word in ("equal", "rounding", "different")] == [1, 1, 1]
    assert [one.name for one in run.moved] == ["c"] and headlines["n_gradients"] == 3
    assert run.fullest_bytes == 40 and replace(run, memory=()).fullest_bytes is None
    assert (
        headlines["rank_peak_bytes"] == [40]
        and headlines["makespan_ms"] is None
        and headlines["highest_multiplier"] is None
    )
