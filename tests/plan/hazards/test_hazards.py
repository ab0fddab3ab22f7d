"""Rules of hazards: each fires where it should and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.hazards.checkpoint_rules import Case, handed, handing_on
from explorer.plan.hazards.hazards import hazards
from explorer.plan.names import innermost
from explorer.record.graph import Block, ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import PipelinePlan, RunSpec

MODEL = ModelRef(target="net.py")


def block(fqn: str, *traits: str, **fields: object) -> Block:
    about = {"kind": "Block", "n_calls": 1, "parameter_bytes": 4, "buffer_bytes": 0, "output_bytes": 4,
             "saved_bytes": 4, "forward_flops": 1, "rerun_flops": 1, **fields}  # fmt: skip
    return Block(fqn=fqn, traits=traits, **about)  # type: ignore[arg-type]


def graph(*blocks: Block, **fields: object) -> ModelGraph:
    root = block("", *{trait for each in blocks for trait in each.traits})
    return ModelGraph(model=MODEL, blocks=(root, *blocks), edges=(), **fields)  # type: ignore[arg-type]


def rules(hazards: object) -> list[str]:
    return [hazard.rule for hazard in hazards]  # type: ignore[attr-defined]


def spec(**fields: object) -> RunSpec:
    return RunSpec(model=MODEL, **fields)  # type: ignore[arg-type]


A = Policy.recompute(["a"])


OPTIONS = {
    "redraw": Policy.recompute(["a"], preserve_rng_state=False),
    "twice": Policy.recompute(["a"], running_stats="every_forward"),
    "reentrant": Policy.recompute(["a"], use_reentrant=True),
    "unchecked": Policy.recompute(["a"], determinism_check="none"),
}


def keeping(op: str) -> Policy:
    return Policy(units=(Unit(blocks=("a",), action="save_ops", save_ops=(op,)),))


CASES = [  # rule, block with its trap, policy that falls in, policy that does not
    ("dropout-redrawn", block("a", "uses_rng"), OPTIONS["redraw"], A),
    ("own-generator", block("a", "own_generator"), A, Policy.recompute(["a"], restore_rng=("a.generator",))),
    ("python-rng", block("a", "python_rng"), A, Policy.recompute(["a"], restore_rng=("python",))),
    ("numpy-rng", block("a", "numpy_rng"), A, Policy.recompute(["a"], restore_rng=("numpy",))),
    ("running-statistics", block("a", "running_statistics"), OPTIONS["twice"], A),
    ("moved-buffers", block("a", "moves_buffers"), A, KEEP_ALL),
    ("moved-attributes", block("a", "moves_attributes"), A, KEEP_ALL),
    ("departs", block("a", "departs", "reads_late", late_reads=("SCALE (1 in forward, then 2)",)), A, KEEP_ALL),
    ("reads-late", block("a", "reads_late", late_reads=("SCALE (1 in forward, then 2)",)), A, KEEP_ALL),
    ("moved-shared", block("a", "moves_shared", moved_shared=("TRACKER",)), A, KEEP_ALL),
    ("kept-cache", block("a", "keeps_cache"), A, KEEP_ALL),
    ("emptied-store", block("a", "takes_stored"), A, KEEP_ALL),
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
    ("selective-random", block("a"), keeping("aten.bernoulli_.float"), keeping("aten.mm.default")),
    ("selective-in-place", block("a"), keeping("aten.add_.Tensor"), keeping("aten.add.Tensor")),
    ("selective-in-place", block("a", rewritten_ops=("aten.mm.default",)), keeping("aten.mm.default"), A),
    ("selective-once", block("a"), Policy(units=(Unit(blocks=("a",), action="save_ops"),)), A),
]


@pytest.mark.parametrize(("rule", "trap", "into", "out"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_fires_in_its_trap_alone_and_names_the_block(rule: str, trap: Block, into: Policy, out: Policy) -> None:
    fired = hazards(graph(trap, block("b")), into)
    assert [hazard.blocks for hazard in fired if hazard.rule == rule] == [("a",)]
    assert all(hazard.sentence.endswith(".") and hazard.remedy.endswith(".") for hazard in fired)
    assert rule not in rules(hazards(graph(trap, block("b")), out)), "cured"
    in_the_policy_alone = not (trap.traits or trap.shares_parameters_with or trap.rewritten_ops or trap.n_calls == 0)
    assert (rule in rules(hazards(graph(block("a"), block("b")), into))) == in_the_policy_alone


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


fqns = st.lists(st.sampled_from("abc"), max_size=4).map(".".join)


@given(st.sets(fqns), st.sets(fqns, min_size=1))
def test_what_lies_under_what_is_found_along_the_names(below: set[str], tops: set[str]) -> None:
    """By walking up each name: asking every pair takes seconds at a thousand blocks."""

    def under(fqn: str, top: str) -> bool:
        return fqn == top or not top or fqn.startswith(f"{top}.")

    named = tuple(sorted(below))
    assert innermost(named) == tuple(a for a in named if not any(a != b and under(b, a) for b in named))
    net = ModelGraph(model=MODEL, blocks=tuple(map(block, named)), edges=())
    stages = tuple((top,) for top in sorted(tops))
    case = Case(net, Policy.recompute(sorted(tops)), PipelinePlan(stages=stages, n_microbatches=1))
    assert [b.fqn for b in case.rerun] == [fqn for fqn in named if any(under(fqn, top) for top in tops)]
    assert case.stage_of == {
        fqn: stages.index((max((top for top in tops if under(fqn, top)), key=len),))
        for fqn in named
        if any(under(fqn, top) for top in tops)
    }


TREE = graph(block("a", "uses_rng"), block("a.b", "uses_rng"), block("c", "moves_buffers"), block("d"))


def test_a_unit_begins_and_ends_with_blocks_and_unknown_ones_are_left_out() -> None:
    case = Case(graph=TREE, policy=Policy.recompute([("a", "c"), "no.such"]))
    assert handed("uses_rng")(case) == ("a",) and handed("moves_buffers")(case) == ()
    assert handing_on("moves_buffers")(case) == ("c",)
    assert [len(named) for _, named in case.units] == [2, 0]


def test_a_trap_below_a_named_block_counts_and_one_beside_it_does_not() -> None:
    net = graph(block("a", "python_rng"), block("a.drop", "python_rng"), block("ab", "python_rng"))
    foreseen = hazards(net, A)
    assert [(hazard.rule, hazard.blocks) for hazard in foreseen] == [("python-rng", ("a.drop",))]
    for kind in ("Block", "Sequential"):  # what a dry rerun found of a block counts if no code stands around the block
        fired = rules(hazards(graph(block("a", kind=kind), block("a.0", "departs")), A))
        assert ("departs" in fired) == (kind == "Sequential")


def test_eval_mode_draws_no_dropout_and_moves_no_statistics() -> None:
    net = graph(block("a", "uses_rng", "running_statistics", "moves_buffers"))
    policy = Policy.recompute(["a"], preserve_rng_state=False, running_stats="every_forward")
    assert hazards(net, policy, spec=spec(mode="eval")) == ()


def test_an_offloaded_block_does_not_run_again() -> None:
    policy = Policy(units=(Unit(blocks=("a",), action="offload"),))
    net = graph(block("a", "python_rng"))
    assert rules(hazards(net, policy, spec=spec(device="cuda"))) == []
    assert rules(hazards(net, policy, spec=spec(device="cpu"))) == ["offload-without-device"]


def test_frozen_blocks_before_a_reentrant_one() -> None:
    policy = OPTIONS["reentrant"]
    assert "reentrant-frozen" in rules(hazards(graph(block("a")), policy, spec=spec(frozen=("embedding",))))
    assert "reentrant-frozen" not in rules(hazards(graph(block("a")), policy, spec=spec()))


def test_autocast_with_reentrant() -> None:
    autocast = spec(autocast="bfloat16")
    assert "reentrant-autocast" in rules(hazards(graph(block("a")), OPTIONS["reentrant"], spec=autocast))
    assert "reentrant-autocast" not in rules(hazards(graph(block("a")), A, spec=autocast))
