"""A rival beats another only within the budget, with the gradient unharmed, and beyond what chance does to both."""

from __future__ import annotations

import random
from collections import Counter
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.record.arena import Arena, Bout, Ground
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.record.times import Samples
from tests.view.builders import HOST

KEPT = Samples(ms=(100.0, 200.0, *[100.0] * 6))


def timed(*ratios: float) -> dict[str, Any]:
    """Beside a step with everything kept that was slow once."""
    step = Samples(ms=tuple(ratio * kept for ratio, kept in zip(ratios, KEPT.ms)))
    return {"step": step, "baseline_step": replace(KEPT, ms=KEPT.ms[: len(ratios)]), "time_ratio": median(ratios)}


MINE = Bout(
    rival="mine", share=0.5, budget_bytes=100, step_peak_bytes=90, verdict="bitwise equal",
    policy=Policy.recompute(["a"]), **timed(1.2, 1.19, 1.21, 1.2, 1.2, 1.2, 1.2, 1.2),
)  # fmt: skip
FASTER = timed(1.1, 1.12, 1.205, 1.1, 1.1, 1.18, 1.1, 1.1)
OTHER = replace(MINE, rival="other", policy=Policy.recompute(["b"]), **FASTER)


def stands(mine: Bout, other: Bout) -> str:
    spec = RunSpec(model=ModelRef(target="a.py"))
    ground = Ground(peak_bytes=200, saved_bytes=100, is_measured=True)
    arena = Arena(spec=spec, environment=HOST, ground=ground, bouts=(mine, other))
    beaten, undecided = arena.beaten("mine"), arena.undecided("mine")
    assert {beaten, undecided} <= {(), ((mine, other),)} and not (beaten and undecided)
    return "beaten" if beaten else "undecided" if undecided else "ahead"


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        ({}, "beaten"),
        ({"share": None, "budget_bytes": None}, "beaten"),
        ({"share": 0.7}, "ahead"),
        (timed(1.1, 1.12, 1.22, 1.1, 1.1, 1.18, 1.1, 1.1), "undecided"),  # one step in eight slower than ours
        (timed(1.1, 1.12, 1.205, 1.1, 1.1, 1.18, 1.1), "undecided"),  # seven pairs are too few to say anything
        (timed(1.2, 1.19, 1.21, 1.2, 1.2, 1.2, 1.2, 1.2), "ahead"),
        (timed(1.3, 1.3, 1.3, 1.1, 1.1, 1.3, 1.3, 1.3), "ahead"),
        ({"step": Samples(), "time_ratio": None}, "ahead"),
        ({"step_peak_bytes": 101}, "ahead"),
        ({"step_peak_bytes": None}, "ahead"),
        ({"verdict": "different"}, "ahead"),
        ({"verdict": "rounding"}, "beaten"),
        ({"policy": MINE.policy}, "ahead"),
    ],
)
def test_what_a_win_takes(changes: dict[str, Any], standing: str) -> None:
    assert stands(MINE, replace(OTHER, **changes)) == standing


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        ({}, "undecided"),  # one of its ratios to everything kept lies above one of ours
        (timed(1.1, 1.12, 1.09, 1.1, 1.1, 1.1, 1.1, 1.1), "beaten"),
        (timed(1.1, 1.12, 1.09, 1.1, 1.1), "undecided"),
        ({"time_ratio": None}, "ahead"),
        (timed(1.3, 1.3, 1.3, 1.1, 1.1, 1.3, 1.3, 1.3), "ahead"),
    ],
)
def test_steps_of_another_process_stand_beside_ours_by_their_ratios(changes: dict[str, Any], standing: str) -> None:
    other = replace(replace(OTHER, **changes), policy=None)  # a rival that is no policy took no turns with us
    assert stands(MINE, other) == standing


def test_a_planner_is_not_beaten_by_its_own_twin() -> None:
    """Equal planners, drawn 300 times: all eight steps of one lie below those of the other once in 256."""
    draw = random.Random(0)
    standings = Counter()
    for _ in range(300):
        mine, other = (timed(*(draw.gauss(1.3, 0.05) for _ in range(8))) for _ in range(2))
        standings[stands(replace(MINE, **mine), replace(OTHER, **other))] += 1
    assert standings["beaten"] <= 4 and min(standings["ahead"], standings["undecided"]) > 100, standings


def test_times_bring_their_ratio_where_there_are_pairs() -> None:
    step, kept = Samples(ms=(12.0, 13.0, 12.0)), Samples(ms=(10.0, 10.0, 10.0))
    bout = Bout(rival="mine").with_times(step, kept)
    assert (bout.step, bout.baseline_step, bout.time_ratio) == (step, kept, 1.2)
    assert Bout(rival="mine").with_times(step, Samples()).time_ratio is None


def test_who_misses_the_budget_is_beaten_by_any_that_keeps_it() -> None:
    assert stands(replace(MINE, step_peak_bytes=101), replace(OTHER, time_ratio=9.0)) == "beaten"


def test_without_budget_or_run_nobody_can_say_whether_it_fits() -> None:
    assert (MINE.fits, MINE.ran) == (True, True)
    assert replace(MINE, step_peak_bytes=101).fits is False
    assert replace(MINE, budget_bytes=None).fits is None
    unran = replace(MINE, step_peak_bytes=None)
    assert unran.headlines() == {"fits": None, "ran": False, "time_interval": (1.19, 1.21)}
