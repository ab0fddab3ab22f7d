"""The changed line, summed tick by tick; units inside units; what running an outer unit again takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.predict.calls import saved_by_calls
from explorer.plan.predict.changes import (
    NO_PARENT,
    Nest,
    again_bytes,
    changes_of,
    enclosing,
    flat,
    held_at,
    line_with,
    nest_of,
    offsets_of,
)
from explorer.plan.predict.replay import Replay
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


ticks = st.integers(0, 12)


@given(st.lists(st.tuples(ticks, ticks, st.integers(-(2**40), 2**40)), max_size=12), st.integers(1, 10))
def test_offsets_are_the_sum_of_all_changes_at_each_tick(changes: list[tuple[int, int, int]], length: int) -> None:
    bounds, offsets = offsets_of(np.array(changes, dtype=np.int64).reshape(-1, 3).T, length)
    line = np.repeat(offsets, np.diff(np.append(bounds, length)))
    assert bounds[0] == 0 and line.tolist() == [
        sum(size for first, end, size in changes if first <= tick < end) for tick in range(length)
    ]


@settings(max_examples=25, deadline=None)
@given(st.builds(Chain, n_blocks=st.integers(1, 4)), st.sets(st.integers(0, 3)))
def test_what_is_held_adds_up_to_the_line_but_for_reruns(chain: Chain, taken: set[int]) -> None:
    replay = Replay.of(run := measured(chain), None)
    calls = [
        call for i in sorted(taken) if i < chain.n_blocks
        for call in saved_by_calls(replay, (f"layers.{i}",), stops_early=True)
    ]  # fmt: skip
    nest = flat(calls)
    simulated = changes_of(replay, nest, run.forward_end_tick, stash_bytes=0)
    line = line_with(replay, simulated, nest, stash_bytes=0)
    again = {max(call.begins - 1, 0) for call in calls}
    for tick in range(len(line)):
        held = int(replay.size[held_at(replay, simulated, tick)].sum())
        assert held == line[tick] or (tick in again and held < line[tick])
