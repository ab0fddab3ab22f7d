"""How reasons name what they look at: the block to toggle, a segment by its ends, a change with its sign."""

from __future__ import annotations

import pytest

from explorer.plan.memory.ledger import ledger
from explorer.plan.why.peak import PeakCase, largest_roles, signed, toggled, unit_name
from explorer.record import ModelGraph, RunSpec
from tests import graphs
from tests.six_layers import GRAPH, SPEC


def case(graph: ModelGraph | None = GRAPH) -> PeakCase:
    pair = graphs.compared(GRAPH, SPEC)
    runs = {"baseline": pair.baseline, "candidate": pair.candidate}
    return PeakCase(**runs, old=ledger(pair.baseline), new=ledger(pair.candidate), graph=graph)


def test_the_change_is_of_the_peak_and_bytes_are_of_either_run() -> None:
    peaks = case()
    before, after = peaks.baseline.step_peak_bytes, peaks.candidate.step_peak_bytes
    assert before is not None and after is not None
    assert peaks.change == pytest.approx(after / before - 1) and peaks.change < 0
    assert peaks.named == SPEC.policy.blocks
    assert peaks.saved("blocks.0", peaks.candidate) < peaks.saved("blocks.0") and peaks.saved("no.such") == 0


@pytest.mark.parametrize(("graph", "toggle"), [(GRAPH, "blocks.3"), (None, "blocks.3")])
def test_what_a_person_toggles_to_reach_a_block(graph: ModelGraph | None, toggle: str) -> None:
    assert toggled(case(graph), "blocks.3.mlp") == toggle and toggled(case(graph), "head") == "head"


def test_roles_that_hold_nothing_are_left_out_and_the_largest_comes_first() -> None:
    roles = largest_roles(ledger(graphs.measured(GRAPH, RunSpec(model=GRAPH.model))))
    sizes = [size for _, size in roles]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0


def test_names_and_signs() -> None:
    assert (
        unit_name(("layers.2",)) == "layers.2"
        and unit_name(("layers.2", "layers.3", "layers.5")) == "layers.2 to layers.5"
    )
    assert (signed(0.12), signed(-0.5)) == ("+12 %", "\u221250 %")
