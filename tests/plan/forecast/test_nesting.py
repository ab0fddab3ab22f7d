"""Units inside units: who holds whom, and what running the outer one again takes."""

from __future__ import annotations

import numpy as np
import pytest

from explorer.plan.forecast.nesting import NO_PARENT, Nest, again_bytes, enclosing, nest_of
from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import saved_by_calls
from explorer.record import ModelGraph, Policy, Unit
from tests.graphs import block
from tests.plan.why.test_peak import graph
from tests.view.builders import MIB, Chain, measured

CHAIN = Chain(n_blocks=2, saved=12 * MIB, n_parts=2, scratch=4 * MIB)
REPLAY = Replay.of(measured(CHAIN), None)
NESTED = Policy.recompute(["layers.0", "layers.0.inner", "layers.1"])


def test_the_innermost_unit_around() -> None:
    policy = Policy(units=tuple(Unit(blocks=blocks) for blocks in (("a",), ("a.b",), ("a.b.c", "a.b.d"), ("ab",))))
    a, b, c, _ = policy.units
    assert enclosing(policy) == {b: a, c: b}


def nest(known: ModelGraph | None = None) -> Nest:
    calls = {unit: saved_by_calls(REPLAY, unit.blocks, stops_early=True) for unit in NESTED.units}
    return nest_of(NESTED, calls, known)


def test_outer_calls_come_first_and_know_what_lies_in_them() -> None:
    tree = nest()
    assert tree.parent == (NO_PARENT, NO_PARENT, 0)
    assert tree.inside == {0: [2]} and tree.below(0) == [2] and tree.above(2) == [0] and tree.below(1) == []


@pytest.mark.parametrize(("last_saved_in", "stops"), [("layers.0.inner", True), ("layers.0", False)])
def test_where_the_outer_rerun_ends_at_the_inner_unit_only_its_generator_state_is_new(
    last_saved_in: str, stops: bool
) -> None:
    """Ending there: the scratch, and the state that the inner unit stashed. Else one part after the other as well."""
    blocks = (block("layers.0", "B", last_saved_in=last_saved_in), block("layers.0.inner", "I"))
    tree = nest(ModelGraph(model=graph().model, blocks=blocks, edges=()))
    assert tree.stops_inside[0] is stops
    inner = tree.calls[2]
    assert np.array_equal(inner.entries, tree.calls[0].entries)
    held = again_bytes(REPLAY, tree, 0, stash_bytes=7)
    assert held == CHAIN.scratch + 7 if stops else held > CHAIN.scratch + 7


def test_without_units_inside_all_of_it_is_held() -> None:
    tree = nest()
    assert again_bytes(REPLAY, tree, 1, stash_bytes=7) == CHAIN.scratch + CHAIN.saved == tree.calls[1].again_bytes
    (call,) = saved_by_calls(REPLAY, ("layers.0",), stops_early=False)
    assert call.again_bytes == CHAIN.scratch + CHAIN.saved + CHAIN.output
