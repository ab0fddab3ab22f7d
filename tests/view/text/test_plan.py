"""What is proven about a plan, and whether a budget was kept, in words."""

from __future__ import annotations

import pytest

from explorer.record import Policy
from explorer.record.plan import Certificate, Plan
from explorer.view.drawing.units import MIB
from explorer.view.text.plan import against_budget, certificate


def plan_of(proof: Certificate, *, budget: int | None = MIB) -> Plan:
    return Plan(
        policy=Policy.recompute(["a"]), step_peak_bytes=MIB, baseline_step_peak_bytes=2 * MIB, extra_cost=1.0,
        step_cost=10.0, cost_unit="ms", budget_bytes=budget, certificate=proof,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gap", "budget", "n_segments", "sentence"),
    [
        (0.0, MIB, 0, "Proven: no other choice among 99 modules, at most one inside another, is faster."),
        (0.0, None, 0, "Proven: no other choice among 99 modules, at most one inside another, needs less memory."),
        (
            0.031,
            MIB,
            24,
            "Nearly proven: no other choice among 75 modules and 24 segments, at most one inside another, is faster by "
            "more than 3.1 %.",
        ),
        (0.0, MIB, 99, "Proven: no other choice among 99 segments, is faster."),
        (1.0, MIB, 98, "The best that was found in time among 1 module and 98 segments; nothing is proven."),
    ],
)
def test_a_certificate_in_words(gap: float, budget: int | None, n_segments: int, sentence: str) -> None:
    proof = Certificate(bound=1.0, gap=gap, n_candidates=99, n_rows=7, n_solves=1, n_segments=n_segments)
    words, meaning = certificate(plan_of(proof, budget=budget))
    assert words == sentence and "7 moments of the step decided it, 1 call of the solver." in meaning


def test_a_budget_is_kept_or_passed() -> None:
    assert against_budget(50 * MIB, 60 * MIB, measured=True) == ":green[50.0 MiB measured: within 60.0 MiB.]"
    assert against_budget(70 * MIB, 60 * MIB, measured=False) == ":red[70.0 MiB predicted: 10.0 MiB over 60.0 MiB.]"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((0, 0, 0), "among 0 modules"),
        ((2, 2, 0), "among 2 segments"),
        ((9, 2, 1), "among 6 modules, 2 segments and 1 way to keep results, at most one inside another"),
        ((3, 0, 2), "among 1 module and 2 ways to keep results"),
    ],
)
def test_what_was_chosen_among_is_counted_by_kind(counts: tuple[int, int, int], words: str) -> None:
    n, n_segments, n_keeping = counts
    proof = Certificate(
        bound=1.0, gap=0.0, n_candidates=n, n_rows=1, n_solves=1, n_segments=n_segments, n_keeping=n_keeping
    )
    told, _ = certificate(plan_of(proof))
    assert f"{words}, is faster" in told
