"""Rows of a chart of blocks: every block that any run measured, in module order, and unknown adds nothing."""

from __future__ import annotations

from explorer.record import Policy, RunSpec
from explorer.view.drawing.rows import block_names, chart_rows, row_sum, runs_of
from tests import graphs
from tests.graphs import GRAPH, SPEC


def test_a_pair_is_two_runs_and_a_run_is_a_baseline() -> None:
    pair = graphs.compared(GRAPH, SPEC)
    assert runs_of(pair) == {"baseline": pair.baseline, "candidate": pair.candidate}
    assert runs_of(pair.baseline) == {"baseline": pair.baseline}


def test_rows_sum_up_what_their_blocks_cost() -> None:
    run = graphs.measured(GRAPH, RunSpec(model=GRAPH.model, policy=Policy()))
    names = block_names(run, run)
    assert names == [cost.fqn for cost in run.blocks]
    rows = chart_rows(run)
    for row in rows:
        expected = sum(run.by_fqn[fqn].saved_after_forward_bytes for fqn in row.fqns)
        assert row_sum(run, row, "saved_after_forward_bytes") == expected
    unmeasured = graphs.measured(graphs.gpt(1), RunSpec(model=GRAPH.model))
    far = next(row for row in rows if row.fqns == ("blocks.5",))
    assert row_sum(unmeasured, far, "saved_after_forward_bytes") == 0


def test_a_run_that_measured_no_block_has_no_rows() -> None:
    assert chart_rows() == ()
