"""Cuts, microbatches and policy together, compared with every plan there is, on small random cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import get_args

import msgspec
import pytest

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.cuts import CutRule, atoms, split_at_borders, stages_by
from explorer.pipeline.plan.joint import joint_plan, microbatch_counts
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import ActionCost, BlockCost, CapWish, JointPlan, PipelineProfile, PlayedSchedule
from explorer.plan.policy.presets import preset
from explorer.record import ModelGraph, ModelRef, Policy, RunSpec
from explorer.record.run import PipelinePlan
from tests import graphs
from tests.pipeline.pipelines import HOST

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


@pytest.mark.parametrize(("seed", "schedule"), [(1, "1F1B"), (3, "GPipe"), (11, "GPipe")])
def test_a_plan_keeps_the_cap_and_is_near_the_best_of_all_plans(seed: int, schedule: str) -> None:
    profile, plan = drawn(seed), asked(3, schedule)
    plans = every_plan(profile, plan)
    least, most = min(plans)[0], max(plans)[0]
    for share in (0.1, 0.3, 0.7):
        cap = int(least + share * (most - least))
        chosen = planned(profile, GRAPH, plan, cap)
        played = predict(profile, chosen.plan, chosen.policy)
        assert chosen.makespan_ms == played.makespan_ms
        assert chosen.rank_bytes == tuple(memory.device_bytes for memory in played.memory)
        assert max(chosen.rank_bytes) <= cap
        best = min(ms for held, ms in plans if held <= cap)
        assert best * (1 - 1e-9) <= chosen.makespan_ms < 1.3 * best
    with pytest.raises(InvalidPlan, match=r"the least of \d+ was .* on rank"):
        planned(profile, GRAPH, plan, least - 1)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_never_worse_than_a_preset_on_an_even_cut(schedule: str) -> None:
    profile = drawn(11)
    n_stages = 4 if schedule == "Interleaved1F1B" else 3
    plan = msgspec.structs.replace(asked(n_stages, schedule), n_microbatches=4)
    presets = [preset(name, GRAPH) for name in ("keep-all", "all", "every-2", "sqrt", "except-last")]
    played = []
    for rule in get_args(CutRule):
        cut = msgspec.structs.replace(plan, stages=stages_by(rule, GRAPH, n_stages, profile=profile))
        policies = [split_at_borders(policy, cut.stages) for policy in presets]
        played += [predict(profile, cut, policy) for policy in policies]
    plans = [(fullest(simulated), simulated.makespan_ms) for simulated in played]
    for cap in {held for held, _ in plans}:
        chosen = planned(profile, GRAPH, plan, cap, 4)
        assert max(chosen.rank_bytes) <= cap
        assert chosen.makespan_ms <= min(ms for held, ms in plans if held <= cap) * (1 + 1e-9)


def test_a_tight_cap_recomputes_more_and_takes_longer() -> None:
    graph = graphs.gpt(16)
    profile, plan = msgspec.structs.replace(drawn(1, graph), batch_rows=8), asked(5, "1F1B")
    free = planned(profile, graph, plan, 2**40, 8)
    assert not free.policy.units
    steps = [planned(profile, graph, plan, int(share * max(free.rank_bytes)), 8) for share in (0.9, 0.8, 0.7)]
    assert free.makespan_ms < steps[0].makespan_ms <= steps[1].makespan_ms <= steps[2].makespan_ms
    assert all(step.policy.units and step.n_judged > 10 for step in steps)


def test_the_block_that_frees_most_for_its_time_is_recomputed_first() -> None:
    """No preset recomputes blocks.1 alone."""
    equal = drawn(1).blocks[0]
    slow = msgspec.structs.replace(equal.recomputed, backward_ms=equal.kept.backward_ms + 9.0)
    quick = msgspec.structs.replace(slow, backward_ms=equal.kept.backward_ms + 1.0)
    blocks = tuple(
        msgspec.structs.replace(equal, blocks=group, recomputed=quick if "blocks.1" in group else slow)
        for group in atoms(GRAPH)
    )  # fmt: skip
    profile = msgspec.structs.replace(drawn(1), blocks=blocks)
    free = planned(profile, GRAPH, asked(1), 2**40, 1)
    chosen = planned(profile, GRAPH, asked(1), max(free.rank_bytes) - 1, 1)
    assert (free.policy.blocks, chosen.policy.blocks) == ((), ("blocks.1",))


def test_no_more_than_64_microbatches_are_tried() -> None:
    counts = microbatch_counts(msgspec.structs.replace(drawn(0), batch_rows=128), asked(1))
    assert counts == [1, 2, 4, 8, 16, 32, 64]
    assert microbatch_counts(msgspec.structs.replace(drawn(0), batch_rows=12), asked(3, "1F1B")) == [3, 4, 6, 12]


def test_a_batch_that_nothing_divides_is_a_sentence() -> None:
    profile = msgspec.structs.replace(drawn(0), batch_rows=3)
    with pytest.raises(InvalidPlan, match="No number of microbatches divides a batch of 3 rows and suits 1F1B"):
        planned(profile, GRAPH, asked(4, "1F1B"), 2**30)
