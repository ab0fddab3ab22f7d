"""Each rule fires on its trap and on nothing else; what the traps do to real models stands in test_hazards_shown.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import InvalidPlan
from explorer.plan.hazards.hazards import hazards
from explorer.plan.pipeline.schedules import rows_of
from explorer.record.graph import Block, CutPoint
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import PipelinePlan
from tests.plan.hazards.case_of import OPTIONS, A, block, graph, rules, spec


def plan(n_microbatches: int = 4, **fields: object) -> PipelinePlan:
    return PipelinePlan(stages=(("a",), ("b",)), n_microbatches=n_microbatches, **fields)  # type: ignore[arg-type]


CASES = [  # rule, block with its trap, policy that falls in, policy that does not
    ("dropout-redrawn", block("a", "uses_rng"), OPTIONS["redraw"], A),
    ("own-generator", block("a", "own_generator"), A, Policy.recompute(["a"], restore_rng=("a.generator",))),
    ("python-rng", block("a", "python_rng"), A, Policy.recompute(["a"], restore_rng=("python",))),
    ("numpy-rng", block("a", "numpy_rng"), A, Policy.recompute(["a"], restore_rng=("numpy",))),
    ("running-statistics", block("a", "running_statistics"), OPTIONS["twice"], A),
    ("moved-buffers", block("a", "moves_buffers"), A, KEEP_ALL),
    ("moved-attributes", block("a", "moves_attributes"), A, KEEP_ALL),
    ("kept-cache", block("a", "keeps_cache"), A, KEEP_ALL),
    ("changed-inputs", block("a", "changes_inputs"), A, KEEP_ALL),
    ("filled-inputs", block("a", "fills_inputs"), A, KEEP_ALL),
    ("hidden-state", block("a", "hidden_state"), A, KEEP_ALL),
    ("statistics-in-use", block("a", "reads_statistics"), A, KEEP_ALL),
    ("never-called", block("a", n_calls=0), A, KEEP_ALL),
    ("random-last", block("a", "uses_rng", "rng_last", kind="RReLU"), A, Policy.recompute(["a"], early_stop=False)),
    ("unchecked-recompute", block("a"), OPTIONS["unchecked"], A),
    ("mode-flips", block("a", "uses_rng"), OPTIONS["reentrant"], A),
    ("reentrant-no-grad-input", block("a", "inputs_need_no_grad"), OPTIONS["reentrant"], A),
    ("reentrant-nested-outputs", block("a", "nested_outputs"), OPTIONS["reentrant"], A),
    ("reentrant-keywords", block("a", "keyword_inputs"), OPTIONS["reentrant"], A),
    ("reentrant-nested-inputs", block("a", "nested_inputs"), OPTIONS["reentrant"], A),
    ("reentrant-shared", block("a", shares_parameters_with=("b",)), OPTIONS["reentrant"], A),
    ("reentrant-second-order", block("a"), OPTIONS["reentrant"], A),
    (
        "selective-random",
        block("a"),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.bernoulli_.float",)),)),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.mm.default",)),)),
    ),
    (
        "selective-in-place",
        block("a"),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.add_.Tensor",)),)),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.add.Tensor",)),)),
    ),
    (
        "selective-in-place",
        block("a", rewritten_ops=("aten.mm.default",)),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.mm.default",)),)),
        Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=("aten.add.Tensor",)),)),
    ),
    ("selective-once", block("a"), Policy(units=(Unit(blocks=("a",), action="save_ops"),)), A),
]


@pytest.mark.parametrize(("rule", "trap", "into", "out"), CASES, ids=[case[0] for case in CASES])
class TestPolicyRules:
    def test_fires_in_its_trap_and_names_the_block(self, rule: str, trap: Block, into: Policy, out: Policy) -> None:
        foreseen = [hazard for hazard in hazards(graph(trap, block("b")), into) if hazard.rule == rule]
        assert [hazard.blocks for hazard in foreseen] == [("a",)]

    def test_is_silent_once_cured(self, rule: str, trap: Block, into: Policy, out: Policy) -> None:
        assert rule not in rules(hazards(graph(trap, block("b")), out))

    def test_is_silent_where_the_block_has_no_such_trait(
        self, rule: str, trap: Block, into: Policy, out: Policy
    ) -> None:
        in_the_policy_alone = not (
            trap.traits or trap.shares_parameters_with or trap.rewritten_ops or trap.n_calls == 0
        )
        assert (rule in rules(hazards(graph(block("a"), block("b")), into))) == in_the_policy_alone

    def test_says_what_to_do(self, rule: str, trap: Block, into: Policy, out: Policy) -> None:
        for hazard in hazards(graph(trap, block("b")), into):
            assert hazard.sentence.endswith(".") and hazard.remedy.endswith(".")


@given(st.permutations([case[1] for case in CASES]))
def test_a_policy_that_recomputes_nothing_has_no_hazard(blocks: list[Block]) -> None:
    assert hazards(graph(*blocks), KEEP_ALL) == ()


def test_a_clean_model_has_no_hazard() -> None:
    assert hazards(graph(block("a"), block("b")), Policy.recompute(["a", "b"])) == ()
    assert hazards(graph(block("a", "uses_rng"), block("b", "running_statistics")), Policy.recompute(["a", "b"])) == ()


def test_errors_come_first() -> None:
    net = graph(block("a", "python_rng", "moves_attributes"), block("b"))
    severities = [hazard.severity for hazard in hazards(net, Policy.recompute(["a"], determinism_check="none"))]
    assert severities == ["error", "warning", "note"]


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
        if fires:
            with pytest.raises(InvalidPlan):
                rows_of(four)
        else:
            rows_of(four)

    def test_refused_cut_only_where_the_plan_cuts(self) -> None:
        cut = CutPoint(after="a", before="b", n_bytes=1, n_tensors=1, refusal="both use one module.")
        net = graph(block("a"), block("b"), cuts=(cut,), input_shapes=((8,),))
        assert "refused-cut" in rules(hazards(net, KEEP_ALL, plan()))
        whole = PipelinePlan(stages=(("a", "b"),), n_microbatches=4)
        assert "refused-cut" not in rules(hazards(net, KEEP_ALL, whole))

    def test_shared_across_a_cut(self) -> None:
        net = graph(block("a", shares_parameters_with=("b",)), block("b", shares_parameters_with=("a",)))
        assert "shared-across-a-cut" in rules(hazards(net, KEEP_ALL, plan()))
        whole = PipelinePlan(stages=(("a", "b"),), n_microbatches=4)
        assert "shared-across-a-cut" not in rules(hazards(net, KEEP_ALL, whole))

    def test_statistics_per_microbatch(self) -> None:
        net = graph(block("a", "running_statistics"), block("b"))
        assert "statistics-per-microbatch" in rules(hazards(net, KEEP_ALL, plan()))
        assert "statistics-per-microbatch" not in rules(hazards(net, KEEP_ALL, plan(1)))

    def test_masks_by_order(self) -> None:
        net = graph(block("a", "uses_rng"), block("b"))
        assert "masks-by-order" in rules(hazards(net, KEEP_ALL, plan(keyed_rng=False)))
        assert "masks-by-order" not in rules(hazards(net, KEEP_ALL, plan()))

    def test_zero_bubble(self) -> None:
        assert "multiplied-recompute" in rules(hazards(self.NET, A, plan(schedule="ZBVZeroBubble")))
        assert "multiplied-recompute" not in rules(hazards(self.NET, A, plan(schedule="1F1B")))
        assert "multiplied-recompute" not in rules(hazards(self.NET, KEEP_ALL, plan(schedule="ZBVZeroBubble")))

    def test_reentrant_stage(self) -> None:
        whole = {hazard.rule: hazard.severity for hazard in hazards(self.NET, OPTIONS["reentrant"], plan())}
        split = {h.rule: h.severity for h in hazards(self.NET, OPTIONS["reentrant"], plan(schedule="ZBVZeroBubble"))}
        assert (whole["reentrant-stage"], split["reentrant-stage"]) == ("warning", "error")
        assert "reentrant-stage" not in rules(hazards(self.NET, A, plan()))

    def test_cache_between_microbatches(self) -> None:
        assert "cache-between-microbatches" in rules(hazards(graph(block("a", "keeps_cache")), KEEP_ALL, plan()))

    def test_nothing_recomputed(self) -> None:
        assert "nothing-recomputed" in rules(hazards(self.NET, A, plan(checkpoint="never")))
        assert "nothing-recomputed" in rules(hazards(self.NET, A, plan(1, checkpoint="except_last")))
        assert "nothing-recomputed" not in rules(hazards(self.NET, A, plan(checkpoint="except_last")))

    def test_the_plan_of_the_run_is_taken(self) -> None:
        assert rules(hazards(self.NET, A, spec=spec(plan=plan(checkpoint="never")))) == ["nothing-recomputed"]
