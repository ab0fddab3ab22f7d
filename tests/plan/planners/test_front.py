"""The front plan by plan, plans held against their runs, and what a refused run says."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPolicy
from explorer.jobs import answers
from explorer.jobs.protocol import FindPlans
from explorer.plan.card.step_on_card import excess_bytes, memory_on
from explorer.plan.planners.candidates import chain_stretches
from explorer.plan.planners.confirm import MOST_PLANS_FOR_A_CARD, confirmed, refusal, within_budget, within_bytes
from explorer.plan.planners.front import find_plans, undominated
from explorer.plan.planners.planner import Planner
from explorer.plan.sizes import mib_up
from explorer.plan.why.worth import worth_recomputing
from explorer.record import Failure, Measurement, Policy, RunSpec
from explorer.record.base import column
from explorer.record.card import Card
from explorer.record.plan import Front, Plan, Progress, Wish, silent
from tests import graphs
from tests.plan.planners.samples import graph_and_run, line_of
from tests.plan.planners.test_chain import Size, chain_of
from tests.view.builders import Chain, cut, measured

MIB = 2**20


GRAPH = graphs.gpt(3)
RUN = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))


def test_every_plan_is_told_as_soon_as_it_is_found() -> None:
    told: list[Progress] = []
    front = find_plans(RUN, GRAPH, Wish(), told.append)
    peaks = [plan.step_peak_bytes for plan in front.plans]
    assert peaks[0] == RUN.step_peak_bytes == max(peaks) and len(set(peaks)) > 2
    assert [progress.done for progress in told] == list(range(len(told)))
    growing = [len(progress.plans) for progress in told]
    assert growing[0] == 0 and growing == sorted(growing) and all(growing[1:])
    assert told[-1].plans == front.plans
    assert not front.plans[0].policy.units


def test_what_another_plan_beats_is_no_point_of_the_front() -> None:
    some = find_plans(RUN, GRAPH, Wish(), silent).plans
    dearer = msgspec.structs.replace(some[1], extra_cost=some[2].extra_cost * 1.5)
    again = msgspec.structs.replace(some[1], budget_bytes=some[1].step_peak_bytes)
    assert undominated((*some, again)) == some
    assert undominated((some[0], dearer, *some[2:])) == (some[0], *some[2:])
    for_nothing = msgspec.structs.replace(some[1], extra_cost=0.0)
    assert undominated((some[0], for_nothing)) == (some[0], for_nothing)


def test_no_preset_lies_below_the_front() -> None:
    graph, run = graph_and_run("gpt")
    front, planner = find_plans(run, graph, Wish(), silent).plans, Planner(run, graph)
    presets = list(planner.presets())
    assert len(presets) > 5
    for peak_bytes, cost in presets:
        assert any(plan.step_peak_bytes <= peak_bytes and plan.extra_cost <= cost * (1 + 1e-9) for plan in front)


def test_a_wish_is_answered_by_one_plan() -> None:
    (plan,) = find_plans(RUN, GRAPH, Wish(budget_bytes=40 * MIB), silent).plans
    assert plan.step_peak_bytes <= 40 * MIB == plan.budget_bytes and plan.policy.units
    (plan,) = find_plans(RUN, GRAPH, Wish(more_time=0.2), silent).plans
    assert plan.cost_ratio is not None and plan.cost_ratio <= 1.2 and plan.step_peak_bytes < (RUN.step_peak_bytes or 0)


def test_both_limits_hold_or_the_refusal_names_what_each_allows() -> None:
    planner = Planner(RUN, GRAPH)
    roomy = planner.fulfil(Wish(budget_bytes=40 * MIB, more_time=1.0))
    assert roomy.policy == planner.within(40 * MIB).policy and roomy.time_budget == 1.0
    assert roomy.cost_ratio is not None and 1 < roomy.cost_ratio <= 2
    least = planner.least_memory(0.01)
    with pytest.raises(BadInput, match=r"within 40\.0 MiB the cheapest takes \+") as refused:
        planner.fulfil(Wish(budget_bytes=40 * MIB, more_time=0.01))
    assert f"the least peak is {mib_up(least.step_peak_bytes)}" in refused.value.sentence
    assert least.step_peak_bytes > 40 * MIB
    (shown,) = find_plans(RUN, GRAPH, Wish(budget_bytes=40 * MIB, more_time=0.01), silent).plans
    assert shown.step_peak_bytes == planner.floor().step_peak_bytes, "refused beside the plan of the least peak"
    slow = planner.fulfil(Wish(more_time=0.5, time_scale=5.0))
    assert slow.policy == planner.least_memory(0.1).policy != planner.least_memory(0.5).policy


def test_a_wish_that_cannot_be_is_told_what_can() -> None:
    floor = find_plans(RUN, GRAPH, Wish(), silent).plans[-1]
    refused = find_plans(RUN, GRAPH, Wish(budget_bytes=MIB), silent)
    assert f"least that can be reached is {floor.step_peak_bytes / MIB:.1f} MiB" in refused.refusal
    assert [plan.step_peak_bytes for plan in refused.plans] == [floor.step_peak_bytes]
    answered = answers.find_plans(FindPlans(run=RUN, graph=GRAPH, wish=Wish(budget_bytes=MIB)), silent)
    assert isinstance(answered, Front) and answered.refusal.startswith(refused.refusal)
    rows = worth_recomputing(RUN, GRAPH)
    assert rows and all(row["why no gain"] in answered.refusal for row in rows), "the page shows the answer"
    assert answers.find_plans(FindPlans(run=RUN, graph=GRAPH, wish=Wish(budget_bytes=40 * MIB)), silent).refusal == ""


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
    tries = confirmed(planner, lambda planner: planner.within(first.budget_bytes or 0), real).tries
    assert [plan.policy for plan, _ in tries] == seen
    assert all(plan.budget_bytes == first.budget_bytes for plan, _ in tries)
    return [(len(plan.policy.units), within_budget(plan, told)) for plan, told in tries]


def test_a_run_within_the_budget_is_not_planned_again() -> None:
    assert [keeps for _, keeps in runs_with(0, [])] == [True]


def test_a_run_over_the_budget_is_planned_once_more_with_as_much_less() -> None:
    missed, again = runs_with(18 * MIB, [])
    assert not missed[1] and again[1] and again[0] > missed[0]


def test_where_nothing_goes_so_low_the_floor_is_tried_and_told_as_missed() -> None:
    tries = runs_with(400 * MIB, [])
    assert [keeps for _, keeps in tries] == [False, False]


def test_a_budget_is_kept_to_the_byte_and_by_a_complete_run_alone() -> None:
    run = measured(CHAIN)
    peak_bytes, stopped = run.step_peak_bytes or 0, cut(run, 9)
    stopped = replace(stopped, failure=Failure(kind="out of memory", sentence="full"))
    kept = [within_bytes(run, budget) for budget in (None, peak_bytes, peak_bytes - 1)]
    assert kept == [True, True, False] and not within_bytes(stopped, None) and not within_bytes(stopped, peak_bytes)


@pytest.mark.parametrize("for_card", [False, True])
def test_a_plan_is_made_again_once_and_for_a_card_four_times(*, for_card: bool) -> None:
    """Where every run holds 16 MiB more than the budget, though a plan of less is always found."""
    graph, run = line_of(Chain(n_blocks=12, saved=16 * MIB))
    planner, runs = Planner(run, graph), []
    budget = planner.keep_all_bytes - 1

    def real(policy: Policy) -> Measurement:
        plain = measured(Chain(n_blocks=12, saved=16 * MIB, parameters=1), range(12))
        assert plain.allocations is not None
        n_bytes = list(plain.allocations.n_bytes)
        n_bytes[0] += budget + 16 * MIB - (plain.step_peak_bytes or 0)
        step = replace(plain, allocations=replace(plain.allocations, n_bytes=column(n_bytes)))
        runs.append(step)
        card = Card(name="small", total_bytes=budget, taken_bytes=0)
        return replace(step, card=memory_on(card, step)) if for_card else step

    tries = confirmed(planner, lambda planner: planner.within(budget), real).tries
    assert not any(within_budget(*one) for one in tries) and len(tries) == len(runs) == (5 if for_card else 2)


def plans_for_card(total_bytes: int, messages: list[str]) -> list[tuple[Plan, Measurement]]:
    graph, run = line_of(CHAIN)
    planner = Planner(run, graph)
    card = Card(name="small", total_bytes=total_bytes, taken_bytes=0)

    def played(policy: Policy) -> Measurement:
        step = measured(CHAIN, [int(fqn.rpartition(".")[2]) for fqn in policy.blocks])
        return replace(step, card=memory_on(card, step))

    return list(confirmed(planner, lambda planner: planner.within(total_bytes), played, messages.append).tries)


def test_a_plan_that_a_card_refuses_is_made_again_until_its_reserved_memory_fits() -> None:
    keep_all_bytes = Planner(*reversed(line_of(CHAIN))).keep_all_bytes
    messages: list[str] = []
    tries = plans_for_card(keep_all_bytes, messages)
    verdicts = [within_budget(plan, run) for plan, run in tries]
    assert verdicts == [False] * (len(tries) - 1) + [True] and 1 < len(tries) <= MOST_PLANS_FOR_A_CARD + 1
    assert len(messages) == len(tries) - 1 and "more than small has: planned again for" in messages[0]
    assert excess_bytes(tries[0][1]) > 0 == excess_bytes(tries[-1][1])
    last = tries[-1][1].card
    assert last is not None and last.reserved_bytes <= keep_all_bytes
    assert all(plan.budget_bytes == keep_all_bytes for plan, _ in tries)


def test_a_card_below_the_reserved_memory_of_every_policy_raises() -> None:
    floor = Planner(*reversed(line_of(CHAIN))).floor()
    with pytest.raises(BadInput, match=r"can be reserved on small: the lowest peak .* no policy brings this step"):
        plans_for_card(floor.step_peak_bytes, [])


@pytest.mark.parametrize(("n_refused", "n_messages"), [(2, 2), (None, 4)], ids=["two pairs", "every pair"])
def test_refused_segments_are_struck_in_few_tries(n_refused: int | None, n_messages: int) -> None:
    """After three refusals every segment beside the fourth goes."""
    graph, run = chain_of([Size()] * 12)
    pairs = {pair for segment in chain_stretches(graph) for pair in list(pairwise(segment))[:n_refused]}
    tried: list[Policy] = []
    messages: list[str] = []

    def real(policy: Policy) -> Measurement:
        assert policy not in tried, "a policy is run once"
        tried.append(policy)
        refused = (pair for unit in policy.units for pair in pairwise(unit.blocks) if pair in pairs)
        if pair := next(refused, None):
            raise InvalidPolicy("Refused.", neighbours=pair)
        return run

    planner = Planner(run, graph)
    assert pairs & {pair for unit in planner.floor().policy.units for pair in pairwise(unit.blocks)}
    last = confirmed(planner, Planner.floor, real, messages.append)
    assert len(last.refused) == len(messages) == n_messages and pairs.issuperset(last.refused)
    assert len(tried) == len(last.refused) + 1 and last.tries[-1][0].policy == tried[-1]
    assert len(last.planner.candidates.units) < len(planner.candidates.units)


@pytest.mark.parametrize("n_refusals", [12, 13])
def test_the_thirteenth_refusal_is_raised(n_refusals: int) -> None:
    graph, run = line_of(CHAIN)
    left = list(range(n_refusals))

    def real(policy: Policy) -> Measurement:
        if left:
            raise InvalidPolicy("Refused.", neighbours=(f"parent{left[-1]}.0", f"parent{left.pop()}.1"))
        return run

    raised = pytest.raises(InvalidPolicy, match="Refused") if n_refusals > 12 else nullcontext()
    with raised:
        assert len(confirmed(Planner(run, graph), Planner.floor, real).refused) == n_refusals
    assert not left


def test_an_invalid_policy_without_refused_blocks_is_raised() -> None:
    graph, run = line_of(CHAIN)

    def invalid(policy: Policy) -> Measurement:
        raise InvalidPolicy("A policy names blocks that are not there.")

    with pytest.raises(InvalidPolicy, match="not there"):
        confirmed(Planner(run, graph), Planner.floor, invalid)


WHOLE = graphs.measured(graphs.GRAPH, RunSpec(model=graphs.GRAPH.model))
FULL = Failure(kind="out of memory", sentence="full", asked_bytes=2**20, free_bytes=0)
assert WHOLE.forward_end_tick is not None
REFUSED = replace(cut(WHOLE, WHOLE.forward_end_tick), failure=FULL, graph=graphs.GRAPH)


def test_a_run_that_was_not_refused_says_nothing() -> None:
    assert refusal(WHOLE) == () and refusal(replace(REFUSED, allocations=None)) == ()


def test_without_a_whole_step_it_says_what_recomputing_would_free() -> None:
    held, could = refusal(REFUSED)
    assert held.startswith("Held then: ") and "of it" in held
    assert could.startswith("Saved activations of blocks.0") and "hold " in could
    assert "Record a step that fits" in refusal(replace(REFUSED, graph=None))[1]


def test_with_a_whole_step_it_says_what_there_was_room_for() -> None:
    _, fits = refusal(REFUSED, WHOLE)
    assert fits.startswith("There was room for ") and "an earlier step held 104.5 MiB" in fits
    room = replace(REFUSED, failure=replace(FULL, free_bytes=2**40))
    assert "this step is larger" in refusal(room, replace(WHOLE, graph=graphs.GRAPH))[1]
