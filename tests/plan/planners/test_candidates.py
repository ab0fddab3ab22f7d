"""What a planner may choose from: modules that run, save something and are safe to run again, each with its price."""

from __future__ import annotations

from explorer.plan.names import above, is_within
from explorer.plan.planners.candidates import _in_error, offered_units
from tests.plan.planners.test_budget import planner
from tests.plan.planners.test_offered import _chain, _changed


def test_candidates_lie_in_blocks_that_are_safe() -> None:
    units = [one.unit.blocks[0] for one in planner("gpt").candidates.units]
    assert "blocks.0.mlp" in units and "blocks.0" in units and "" not in units
    assert any(is_within(one, "blocks.1") and one != "blocks.1" for one in units)


def test_each_knows_those_around_it_innermost_first() -> None:
    candidates = planner("gpt").candidates
    names = [one.unit.blocks for one in candidates.units]
    for one, around in zip(candidates.units, candidates.around, strict=True):
        outer = [names[i][0] for i in around if len(names[i]) == 1]
        assert outer == [fqn for fqn in above(one.unit.blocks[0]) if fqn in outer]
        assert all(is_within(one.unit.blocks[0], fqn) for fqn in outer)


def test_a_price_is_less_than_the_step_and_segments_are_offered() -> None:
    candidates = planner("mlp").candidates
    prices = {one.unit.blocks: one.cost for one in candidates.units}
    assert all(0 <= price < candidates.step_cost for price in prices.values())
    segments = [blocks for blocks in prices if len(blocks) > 1]
    assert segments


def test_a_block_that_writes_into_its_input_forbids_the_segments_that_begin_with_it_alone() -> None:
    graph = _changed(_chain(5), "h.2", traits=("changes_inputs",))
    units = offered_units(graph, every_stretch=True)
    assert _in_error(graph, units) == {unit for unit in units if unit[0] == "h.2"}
