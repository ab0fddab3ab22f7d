"""What goes into a policy file as proof: the comparison's own figures, and nothing where nothing was proven."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.plan.policy.file import evidence_of
from explorer.record import Failure, Policy
from tests import graphs
from tests.six_layers import GRAPH, SPEC

PAIR = graphs.compared(GRAPH, SPEC)


def test_the_figures_are_those_of_both_runs() -> None:
    evidence = evidence_of(PAIR, GRAPH)
    assert evidence is not None
    assert evidence.step_peak_bytes == PAIR.candidate.step_peak_bytes
    assert evidence.baseline_step_peak_bytes == PAIR.baseline.step_peak_bytes
    assert evidence.saved_after_forward_bytes == PAIR.candidate.saved_after_forward_bytes
    assert (evidence.verdict, evidence.input_shapes) == (PAIR.verdict, GRAPH.input_shapes)
    assert evidence.baseline_policy is None, "everything is kept there"
    assert evidence_of(PAIR).input_shapes == ()


def test_a_baseline_with_a_policy_is_named() -> None:
    other = replace(PAIR.baseline.spec, policy=Policy.recompute(["head"]))
    pair = replace(PAIR, baseline=replace(PAIR.baseline, spec=other))
    assert evidence_of(pair).baseline_policy == other.policy


def test_a_run_that_was_cut_short_or_only_foreseen_proves_nothing() -> None:
    failure = Failure(kind="out of memory", sentence="full")
    assert evidence_of(replace(PAIR, candidate=replace(PAIR.candidate, failure=failure), failure=failure)) is None
    assert evidence_of(replace(PAIR, candidate=replace(PAIR.candidate, origin="predicted"))) is None
