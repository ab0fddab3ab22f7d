"""What hazard rules ask of a graph and a policy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.hazards.checkpoint_rules import Case
from explorer.plan.names import innermost
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan
from tests.plan.hazards.case_of import MODEL, block, graph, spec

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


def test_what_runs_again_is_what_is_recomputed_and_all_below() -> None:
    case = Case(graph=TREE, policy=Policy.recompute(["a"]))
    assert [one.fqn for one in case.rerun] == ["a", "a.b"]
    assert case.rerun_with("uses_rng") == ("a.b",) and case.rerun_with("moves_buffers") == ()


def test_a_unit_begins_and_ends_with_blocks_and_unknown_ones_are_left_out() -> None:
    case = Case(graph=TREE, policy=Policy.recompute([("a", "c"), "no.such"]))
    assert case.handed("uses_rng") == ("a",) and case.handed("moves_buffers") == ()
    assert case.handing_on("moves_buffers") == ("c",)
    assert [len(named) for _, named in case.units] == [2, 0]


def test_a_block_lives_on_the_stage_that_names_it_or_one_around_it() -> None:
    plan = PipelinePlan(stages=(("a",), ("c", "d")), n_microbatches=1)
    assert Case(graph=TREE, policy=Policy(), plan=plan).stage_of == {"a": 0, "a.b": 0, "c": 1, "d": 1}
    assert Case(graph=TREE, policy=Policy()).stage_of == {}


def test_without_a_run_a_model_trains_on_no_gpu() -> None:
    assert Case(graph=TREE, policy=Policy()).trains and not Case(graph=TREE, policy=Policy()).on_cuda
    ran = Case(graph=TREE, policy=Policy(), spec=spec(mode="eval", device="cuda"))
    assert not ran.trains and ran.on_cuda
