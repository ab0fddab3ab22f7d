"""The size of a page: from which number of events there are no tables, and how many segments have one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.plan.predict import tables
from explorer.plan.predict.tables import step_tables
from tests.graphs import block, graph_of
from tests.plan.planners.samples import line_of
from tests.view.builders import Chain, measured


@pytest.mark.parametrize(("n_events", "has_tables"), [(100_000, True), (100_001, False)])
def test_a_step_of_many_events_has_no_tables(n_events: int, *, has_tables: bool) -> None:
    graph, run = line_of(Chain(n_blocks=1))
    assert run.allocations is not None
    run = replace(run, allocations=replace(run.allocations, n_ticks=n_events - 1))
    assert (step_tables(run, graph) is not None) == has_tables


@pytest.mark.parametrize(("most", "n_segments"), [(10**6, 6), (18, 4), (17, 3), (11, 2), (5, 1)])
def test_the_shortest_segments_have_tables_up_to_one_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, most: int, n_segments: int
) -> None:
    monkeypatch.setattr(tables, "MOST_IN_SEGMENTS", most)
    names = [f"layers.{i}" for i in range(4)]
    follows = dict(zip(names[1:], names))
    graph = graph_of(*(block(name, "B", follows=follows.get(name, "")) for name in names))
    found = step_tables(measured(Chain(n_blocks=4)), graph)
    assert found is not None
    segments = [unit for unit in found.units if len(unit.blocks) > 1]
    assert len(segments) == n_segments
