"""Traps of a plan fire in their trap alone."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.schedules import rows_of
from explorer.plan.hazards.hazards import hazards
from explorer.record.graph import CutPoint, ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import PipelinePlan, RunSpec
from tests import graphs
from tests.pipeline import pipelines
from tests.plan.hazards.test_hazards import OPTIONS, A, block, graph, rules, spec


def plan(n_microbatches: int = 4, **fields: object) -> PipelinePlan:
    return PipelinePlan(stages=(("a",), ("b",)), n_microbatches=n_microbatches, **fields)  # type: ignore[arg-type]


CUT = CutPoint(after="a", before="b", n_bytes=1, n_tensors=1, refusal="both use one module.")


WHOLE = PipelinePlan(stages=(("a", "b"),), n_microbatches=4)


TIED = graph(block("a", shares_parameters_with=("b",)), block("b", shares_parameters_with=("a",)))


ZERO_BUBBLE = plan(schedule="ZBVZeroBubble")


PLANS = [  # rule, model, plan that falls in, plan that does not, policy
    ("refused-cut", graph(block("a"), block("b"), cuts=(CUT,), input_shapes=((8,),)), plan(), WHOLE, KEEP_ALL),
    ("shared-across-a-cut", TIED, plan(), WHOLE, KEEP_ALL),
    ("statistics-per-microbatch", graph(block("a", "running_statistics"), block("b")), plan(), plan(1), KEEP_ALL),
    ("masks-by-order", graph(block("a", "uses_rng"), block("b")), plan(keyed_rng=False), plan(), KEEP_ALL),
    ("multiplied-recompute", graph(block("a"), block("b")), ZERO_BUBBLE, plan(schedule="1F1B"), A),
    ("cache-between-microbatches", graph(block("a", "keeps_cache")), plan(), None, KEEP_ALL),
    ("nothing-recomputed", graph(block("a"), block("b")), plan(checkpoint="never"), plan(), A),
    ("nothing-recomputed", graph(block("a"), block("b")), plan(1, checkpoint="except_last"), plan(1), A),
]


@pytest.mark.parametrize(("rule", "net", "into", "out", "policy"), PLANS, ids=[case[0] for case in PLANS])
def test_a_rule_of_pipelines_fires_in_its_trap_alone(
    rule: str, net: ModelGraph, into: PipelinePlan, out: PipelinePlan | None, policy: Policy
) -> None:
    assert rule in rules(hazards(net, policy, into)) and rule not in rules(hazards(net, policy, out))


class TestPipelineRules:
    NET = graph(block("a"), block("b"), input_shapes=((8, 4),))

    def test_a_plan_without_traps(self) -> None:
        assert hazards(self.NET, KEEP_ALL, plan()) == ()

    @given(st.integers(1, 32), st.integers(1, 32))
    def test_indivisible_batch(self, n_samples: int, n_microbatches: int) -> None:
        net = graph(block("a"), block("b"), input_shapes=((n_samples, 4),))
        fires = "indivisible-batch" in rules(hazards(net, KEEP_ALL, plan(n_microbatches)))
        assert fires == (n_samples % n_microbatches != 0)

    @pytest.mark.parametrize(
        ("schedule", "n_microbatches"), [*itertools.product(["GPipe", "1F1B", "LoopedBFS"], [1, 2, 4])]
    )
    def test_few_microbatches(self, schedule: str, n_microbatches: int) -> None:
        fires = "few-microbatches" in rules(hazards(self.NET, KEEP_ALL, plan(n_microbatches, schedule=schedule)))
        assert fires == (schedule == "1F1B" and n_microbatches < 2)

    @pytest.mark.parametrize(("n_microbatches", "fires"), [(1, False), (2, False), (4, False), (5, True), (6, False)])
    def test_uneven_rounds(self, n_microbatches: int, fires: bool) -> None:
        stages = tuple((fqn,) for fqn in "abcd")
        four = PipelinePlan(stages=stages, n_microbatches=n_microbatches, schedule="Interleaved1F1B", n_ranks=2)
        assert fires == ("uneven-rounds" in rules(hazards(self.NET, KEEP_ALL, four)))
        with pytest.raises(InvalidPlan) if fires else nullcontext():
            rows_of(four)

    @pytest.mark.parametrize(("is_deferred", "moved"), [(True, "move once a batch"), (False, "move 4 times a batch")])
    def test_running_statistics(self, is_deferred: bool, moved: str) -> None:
        net = graph(block("a", "running_statistics"), block("b"))
        (hazard,) = hazards(net, KEEP_ALL, plan(deferred_batch_norm=is_deferred))
        assert moved in hazard.sentence and hazard.blocks == ("a",)

    def test_reentrant_stage(self) -> None:
        whole = {hazard.rule: hazard.severity for hazard in hazards(self.NET, OPTIONS["reentrant"], plan())}
        split = {h.rule: h.severity for h in hazards(self.NET, OPTIONS["reentrant"], plan(schedule="ZBVZeroBubble"))}
        assert (whole["reentrant-stage"], split["reentrant-stage"]) == ("warning", "error")
        assert "reentrant-stage" not in rules(hazards(self.NET, A, plan()))

    def test_the_plan_of_the_run_is_taken(self) -> None:
        assert rules(hazards(self.NET, A, spec=spec(plan=plan(checkpoint="never")))) == ["nothing-recomputed"]


GRAPH = graphs.gpt(6)


def fired(plan: PipelinePlan, policy: Policy = KEEP_ALL, **spec: object) -> set[str]:
    asked = RunSpec(model=ModelRef(target="m.py"), policy=policy, plan=plan, **spec)  # type: ignore[arg-type]
    return {hazard.rule for hazard in hazards(GRAPH, policy, plan, asked)}


@pytest.mark.parametrize(("schedule", "lost"), [("ZBVZeroBubble", True), ("Interleaved1F1B", False)])
def test_behind_frozen_stages_a_split_backward_loses_gradients(schedule: str, lost: bool) -> None:
    plan = pipelines.planned(GRAPH, 4, schedule=schedule)
    assert ("lost-gradients" in fired(plan, frozen=plan.stages[0])) == lost
    assert "lost-gradients" not in fired(plan)
    assert "lost-gradients" not in fired(plan, frozen=plan.stages[0][:1])


@pytest.mark.parametrize(("schedule", "raises"), [("InterleavedZeroBubble", True), ("1F1B", False)])
def test_saved_operators_are_handed_out_once(schedule: str, raises: bool) -> None:
    unit = Unit(blocks=("blocks.1",), action="save_ops", save_ops=("aten.mm.default",))
    plan = pipelines.planned(GRAPH, 4, schedule=schedule)
    assert ("saved-ops-split" in fired(plan, Policy(units=(unit,)))) == raises


def test_an_idle_rank_is_said() -> None:
    plan = PipelinePlan(stages=(GRAPH.chain,), n_microbatches=1, actions=(("0F0", "0B0"), ()))
    assert "idle-rank" in fired(plan)
