"""A rival beats another only within the budget, with the gradient unharmed, and outside of the spread of both."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from explorer.record.arena import Arena, Bout, Ground
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.view.builders import HOST

MINE = Bout(
    rival="mine", share=0.5, budget_bytes=100, step_peak_bytes=90, time_ratio=1.2, time_ratio_spread=0.01,
    verdict="bitwise equal", policy=Policy.recompute(["a"]),
)  # fmt: skip
OTHER = replace(MINE, rival="other", time_ratio=1.1, policy=Policy.recompute(["b"]))


def beaten(mine: Bout, other: Bout) -> bool:
    spec = RunSpec(model=ModelRef(target="a.py"))
    ground = Ground(peak_bytes=200, saved_bytes=100, is_measured=True)
    arena = Arena(spec=spec, environment=HOST, ground=ground, bouts=(mine, other))
    pairs = arena.beaten("mine")
    assert pairs in ((), ((mine, other),))
    return bool(pairs)


@pytest.mark.parametrize(
    ("changes", "wins"),
    [
        ({}, True),
        ({"share": None, "budget_bytes": None}, True),
        ({"share": 0.7}, False),
        ({"time_ratio": 1.19}, False),
        ({"time_ratio_spread": 0.09}, False),
        ({"time_ratio": None}, False),
        ({"step_peak_bytes": 101}, False),
        ({"step_peak_bytes": None}, False),
        ({"verdict": "different"}, False),
        ({"verdict": "rounding"}, True),
        ({"policy": MINE.policy}, False),
    ],
)
def test_what_a_win_takes(changes: dict[str, Any], wins: bool) -> None:
    assert beaten(MINE, replace(OTHER, **changes)) == wins


def test_who_misses_the_budget_is_beaten_by_any_that_keeps_it() -> None:
    assert beaten(replace(MINE, step_peak_bytes=101), replace(OTHER, time_ratio=9.0))


def test_without_budget_or_run_nobody_can_say_whether_it_fits() -> None:
    assert (MINE.fits, MINE.ran) == (True, True)
    assert replace(MINE, step_peak_bytes=101).fits is False
    assert replace(MINE, budget_bytes=None).fits is None
    unran = replace(MINE, step_peak_bytes=None)
    assert unran.headlines() == {"fits": None, "ran": False}
