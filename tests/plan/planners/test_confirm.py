"""A plan whose run holds more than it may is not what comes out: it is planned again, and both are told."""

from __future__ import annotations

import dataclasses

from explorer.plan.planners.budget import Planner
from explorer.plan.planners.confirm import confirmed, kept
from explorer.record import Measurement, Policy
from tests.plan.planners.test_budget import line_of
from tests.view.builders import Chain, measured

MIB = 2**20
CHAIN = Chain(n_blocks=6, parameters=MIB, saved=16 * MIB)


def runs_with(more_bytes: int, seen: list[Policy]) -> list[tuple[int, bool]]:
    """Units of each try and whether it kept its budget, where every step holds more than was foreseen."""
    graph, run = line_of(CHAIN)
    heavier = dataclasses.replace(CHAIN, parameters=CHAIN.parameters + more_bytes // (3 * CHAIN.n_blocks))
    planner = Planner(run, graph)

    def real(policy: Policy) -> Measurement:
        seen.append(policy)
        return measured(heavier, [int(fqn.rpartition(".")[2]) for fqn in policy.blocks])

    first = planner.within(int(0.8 * planner.keep_all_bytes))
    tries = confirmed(planner, first, real)
    assert [plan.policy for plan, _ in tries] == seen
    assert all(plan.budget_bytes == first.budget_bytes for plan, _ in tries)
    return [(len(plan.policy.units), kept(plan, told)) for plan, told in tries]


def test_a_run_within_the_budget_is_not_planned_again() -> None:
    assert [keeps for _, keeps in runs_with(0, [])] == [True]


def test_a_run_over_the_budget_is_planned_once_more_with_as_much_less() -> None:
    missed, again = runs_with(18 * MIB, [])
    assert not missed[1] and again[1] and again[0] > missed[0]


def test_where_nothing_goes_so_low_the_floor_is_tried_and_told_as_missed() -> None:
    tries = runs_with(400 * MIB, [])
    assert [keeps for _, keeps in tries] == [False, False]
