"""Cuts, microbatches and policy together, compared with every plan there is, on small random cases."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from itertools import combinations
from typing import get_args

import msgspec
import pytest

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.cuts import CutRule, atoms, stages_by
from explorer.plan.pipeline.stage_costs import predict
from explorer.plan.planners import joint
from explorer.plan.planners.joint import RankChoices, joint_plan, least_step_ms, microbatch_counts, subsets_by_price
from explorer.record import ModelGraph, ModelRef, Policy, RunSpec
from explorer.record.pipeline import ActionCost, BlockCost, PipelineProfile, PlayedSchedule
from explorer.record.plan import CapWish, JointPlan
from explorer.record.run import PipelinePlan
from tests import graphs
from tests.pipelines import HOST

MIB = 2**20
GRAPH = graphs.gpt(3)
ROWS = 4


def drawn(seed: int, graph: ModelGraph = GRAPH) -> PipelineProfile:
    """Prices at random; a recomputed block holds less and takes its forward once more."""
    dice = random.Random(seed)
    blocks = []
    for group in atoms(graph):
        forward, back = dice.uniform(0.5, 3.0), dice.uniform(1.0, 5.0)
        saved, kept_input = dice.randint(3, 12) * MIB, dice.randint(1, 3) * MIB
        extra, gradient = dice.randint(0, 2) * MIB, dice.randint(0, 4) * MIB
        kept = ActionCost(
            forward_ms=forward, backward_ms=back, saved_bytes=saved, forward_extra_bytes=saved + extra,
            backward_extra_bytes=extra, first_backward_extra_bytes=extra + gradient,
        )  # fmt: skip
        again = msgspec.structs.replace(
            kept, backward_ms=back + forward, recompute_ms=forward, saved_bytes=kept_input,
            backward_extra_bytes=extra + saved - kept_input,
            first_backward_extra_bytes=extra + gradient + saved - kept_input,
        )  # fmt: skip
        blocks.append(
            BlockCost(
                blocks=group,
                kept=kept,
                recomputed=again,
                parameter_bytes=gradient,
                gradient_bytes=gradient,
                output_bytes=MIB,
            )
        )
    spec = RunSpec(model=ModelRef(target="x"), optimizer=dice.choice(("adamw", "none")))
    return PipelineProfile(spec=spec, environment=HOST, n_rows=1, batch_rows=ROWS, blocks=tuple(blocks))


def asked(n_stages: int, schedule: str = "GPipe") -> PipelinePlan:
    return PipelinePlan(stages=((),) * n_stages, n_microbatches=1, schedule=schedule)


def planned(
    profile: PipelineProfile, graph: ModelGraph, plan: PipelinePlan, cap_bytes: int, n: int | None = None
) -> JointPlan:
    return joint_plan(profile, graph, CapWish(asked=plan, cap_bytes=cap_bytes, n_microbatches=n))


def every_cut(profile: PipelineProfile, n_stages: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    groups = [block.blocks for block in profile.blocks]
    for cuts in combinations(range(1, len(groups)), n_stages - 1):
        borders = (0, *cuts, len(groups))
        yield tuple(tuple(fqn for group in groups[a:b] for fqn in group) for a, b in zip(borders, borders[1:]))


def every_policy(profile: PipelineProfile) -> Iterator[Policy]:
    fqns = [fqn for block in profile.blocks for fqn in block.blocks]
    for n in range(len(fqns) + 1):
        for chosen in combinations(fqns, n):
            yield Policy.recompute(chosen)


def fullest(played: PlayedSchedule) -> int:
    return max(memory.device_bytes or 0 for memory in played.memory)


def every_plan(profile: PipelineProfile, plan: PipelinePlan) -> list[tuple[int, float]]:
    """Bytes of the fullest rank, and time, of all plans there are."""
    plans = []
    for n_microbatches in microbatch_counts(profile, plan):
        for stages in every_cut(profile, len(plan.stages)):
            whole = msgspec.structs.replace(plan, stages=stages, n_microbatches=n_microbatches)
            for policy in every_policy(profile):
                played = predict(profile, whole, policy)
                plans.append((fullest(played), played.makespan_ms))
    return plans


def test_no_plan_at_all_is_quicker_under_the_cap() -> None:
    profile, plan = drawn(1), asked(3, "1F1B")
    plans = every_plan(profile, plan)
    least, most = min(plans)[0], max(plans)[0]
    for share in (0.0, 0.3):
        cap = int(least + share * (most - least))
        chosen = planned(profile, GRAPH, plan, cap)
        played = predict(profile, chosen.plan, chosen.policy)
        assert chosen.makespan_ms == played.makespan_ms
        assert chosen.rank_bytes == tuple(memory.device_bytes for memory in played.memory)
        assert max(chosen.rank_bytes) <= cap
        best = min(ms for held, ms in plans if held <= cap)
        assert chosen.makespan_ms == pytest.approx(best)
        assert 0.5 * best < chosen.bound_ms <= best * (1 + 1e-9)
    with pytest.raises(InvalidPlan, match=r"the least was .* on rank"):
        planned(profile, GRAPH, plan, least - 1)


def heavy_in_front(profile: PipelineProfile) -> PipelineProfile:
    """As convolutional nets are: the first blocks hold most."""
    n, blocks = len(profile.blocks), []
    for k, block in enumerate(profile.blocks):
        more, kept, again = 2 * MIB * (n - k), block.kept, block.recomputed
        kept = msgspec.structs.replace(
            kept, saved_bytes=kept.saved_bytes + more, forward_extra_bytes=kept.forward_extra_bytes + more
        )
        names = ("forward_extra_bytes", "backward_extra_bytes", "first_backward_extra_bytes")
        again = msgspec.structs.replace(again, **{name: getattr(again, name) + more for name in names})
        blocks.append(msgspec.structs.replace(block, kept=kept, recomputed=again))
    return msgspec.structs.replace(profile, blocks=tuple(blocks), batch_rows=8)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_never_worse_than_any_policy_on_an_even_cut(schedule: str) -> None:
    """Cuts first, by every rule, and then every policy there is."""
    profile, dice = drawn(11), random.Random(1)
    n_stages = 4 if schedule == "Interleaved1F1B" else 3
    plan = msgspec.structs.replace(asked(n_stages, schedule), n_microbatches=4)
    played = []
    for rule in get_args(CutRule):
        cut = msgspec.structs.replace(plan, stages=stages_by(rule, GRAPH, n_stages, profile=profile))
        played += [predict(profile, cut, policy) for policy in every_policy(profile)]
    plans = [(fullest(one), one.makespan_ms) for one in played]
    cap = int(dice.uniform(min(plans)[0], max(plans)[0]))
    chosen = planned(profile, GRAPH, plan, cap, 4)
    assert max(chosen.rank_bytes) <= cap
    assert chosen.makespan_ms <= min(ms for held, ms in plans if held <= cap) * (1 + 1e-9)
    assert chosen.bound_ms <= chosen.makespan_ms


def test_cuts_first_and_policy_second_is_slower() -> None:
    """The rank that holds most recomputes most, unless it gets fewer blocks."""
    graph, plan = graphs.gpt(14), asked(3)
    profile = heavy_in_front(drawn(1, graph))
    free = planned(profile, graph, plan, 2**40, 8)
    chosen = planned(profile, graph, plan, int(0.55 * max(free.rank_bytes)), 8)
    assert chosen.cuts_first_ms is not None and chosen.makespan_ms < 0.97 * chosen.cuts_first_ms


@pytest.mark.parametrize(("seed", "schedule"), [(3, "GPipe"), (11, "1F1B")])
def test_moved_borders_reach_what_trying_every_cut_finds(
    monkeypatch: pytest.MonkeyPatch, seed: int, schedule: str
) -> None:
    """Neither the even cuts nor the balanced one is as quick here."""
    profile, plan = heavy_in_front(drawn(seed)), asked(3, schedule)
    cap = int(0.7 * max(planned(profile, GRAPH, plan, 2**40, 4).rank_bytes))
    every = planned(profile, GRAPH, plan, cap, 4)
    monkeypatch.setattr(joint, "MOST_CUTS", 0)
    moved = planned(profile, GRAPH, plan, cap, 4)
    assert moved.makespan_ms == every.makespan_ms < (every.cuts_first_ms or math.inf)
    assert moved.n_judged < every.n_judged


def test_many_blocks_are_cut_without_trying_every_cut() -> None:
    graph = graphs.gpt(16)
    profile, plan = msgspec.structs.replace(drawn(1, graph), batch_rows=8), asked(5, "1F1B")
    free = planned(profile, graph, plan, 2**40, 8)
    cap = int(0.7 * max(free.rank_bytes))
    chosen = planned(profile, graph, plan, cap, 8)
    assert max(chosen.rank_bytes) <= cap
    assert chosen.cuts_first_ms is None or chosen.makespan_ms <= chosen.cuts_first_ms
    assert free.makespan_ms < chosen.makespan_ms < 2 * free.makespan_ms


def test_a_batch_that_nothing_divides_is_a_sentence() -> None:
    profile = msgspec.structs.replace(drawn(0), batch_rows=3)
    with pytest.raises(InvalidPlan, match="No number of microbatches divides a batch of 3 rows and suits 1F1B"):
        planned(profile, GRAPH, asked(4, "1F1B"), 2**30)


GROUPS = atoms(GRAPH)


def test_a_tighter_cap_never_lowers_it_and_below_the_parameters_there_is_none() -> None:
    profile = drawn(1)
    shape = PipelinePlan(stages=((), ()), n_microbatches=2, schedule="1F1B")
    caps = [2**20 * n for n in (10_000, 60, 40, 20, 1)]
    bounds = [least_step_ms(RankChoices(profile, shape, [True] * len(GROUPS), cap)) for cap in caps]
    assert bounds == sorted(bounds) and bounds[-1] == float("inf")


PROFILE = drawn(3)
N = len(PROFILE.blocks)
SHAPE = PipelinePlan(stages=((), ()), n_microbatches=2, schedule="GPipe")
BORDERS = (0, N // 2, N)


def choices(cap_bytes: int, worth: bool = True) -> RankChoices:
    return RankChoices(PROFILE, SHAPE, [worth] * N, cap_bytes)


def more_ms(chosen: frozenset[int]) -> float:
    blocks = (PROFILE.blocks[k] for k in chosen)
    return sum(one.recomputed.backward_ms - one.kept.backward_ms for one in blocks)


def test_no_cheaper_choice_of_a_rank_fits() -> None:
    cap = int(0.85 * max(choices(2**60).under(BORDERS).rank_bytes))
    known = choices(cap)
    chosen = known.under(BORDERS)
    for stage, (first, end) in enumerate(zip(BORDERS, BORDERS[1:])):
        own = frozenset(k for k in chosen.recomputed if first <= k < end)
        places = range(first, end)
        every = [frozenset(taken) for n in range(len(places) + 1) for taken in itertools.combinations(places, n)]
        fitting = [one for one in every if known.outcome(((stage, first, end),), one).rank_bytes[0] <= cap]
        if fitting:
            assert chosen.rank_bytes[stage] <= cap
            assert more_ms(own) == pytest.approx(min(map(more_ms, fitting)))


def test_what_is_not_worth_it_is_never_recomputed_and_nothing_fits_nowhere() -> None:
    assert choices(1, worth=False).under(BORDERS).recomputed == frozenset()
    assert choices(1).stage_ms(0, 0, N // 2) == float("inf") and choices(2**60).stage_ms(0, 0, N // 2) > 0


def test_all_subsets_come_in_order_of_their_price() -> None:
    price = [3.0, 1.0, 2.5, 0.5]
    subsets = list(subsets_by_price(range(4), price))
    sums = [sum(price[k] for k in one) for one in subsets]
    assert len(set(subsets)) == 16 and sums == sorted(sums)
    assert list(subsets_by_price([], [])) == [frozenset()]
