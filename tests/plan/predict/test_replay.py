"""Calls on the timeline: what they leave behind, what units inside units hold, and the changed line tick by tick."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.names import is_within
from explorer.plan.predict import calls
from explorer.plan.predict.calls import calls_of, most_at_once, results_of_views, saved_by_calls
from explorer.plan.predict.changes import NO_PARENT, Nest, freed_again_at, nest_of, offsets_of, rerun_bytes, simulate
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.replay import BACKWARD, FORWARD, NEVER, Call, Replay, let_go
from explorer.record import Measurement, ModelGraph, Policy, Unit
from explorer.record.plan import Forecast
from tests.graphs import block, graph_of
from tests.view.builders import MIB, Book, Chain, measured, runs, two_blocks


@settings(max_examples=30, deadline=None)
@given(runs(), st.integers(0, 60), st.integers(0, 60))
def test_entries_of_a_block_and_between_two_ticks(run: Measurement, first: int, end: int) -> None:
    replay, log = Replay.of(run, None), run.allocations
    assert log is not None
    for fqn in {"layers", *log.blocks} - {""}:
        expected = {i for i, of in enumerate(log.block) if is_within(log.blocks[of], fqn)}
        assert set(replay.below(fqn).tolist()) == expected
    between = replay.between(first, end)
    assert set(between.tolist()) == {i for i, born in enumerate(log.born) if first < born <= end}
    assert (np.diff(replay.born[between]) >= 0).all(), "in order of birth"
    assert set(replay.results[:-1].tolist()) == {born for born, role in zip(log.born, log.role) if role != 8}, (
        "8 is unattributed: no operator returned it"
    )


def test_phases_end_where_the_next_begins() -> None:
    run = measured(Chain(n_blocks=2))
    replay = Replay.of(run, None)
    spans = {span.phase: span for span in run.phases}
    backward = spans["backward"]
    assert replay.phase[backward.end_tick - 1] == BACKWARD != replay.phase[backward.end_tick]
    last = replay.forward_ends(spans["forward"].first_tick) - 1
    assert replay.phase[last] == FORWARD and last in replay.births


def test_who_saves_an_entry_is_taken_from_the_graph_where_its_calls_have_as_many() -> None:
    run = measured(Chain(n_blocks=2))
    blocks = (
        block("layers.0", "B", inputs_saved_in=(("layers.0",),), outputs_saved_in=(("layers.1", ""),)),
        block("layers.1", "B", outputs_saved_in=((), ())),
    )
    replay = Replay.of(run, graph_of(*blocks))
    (one,), (two,) = replay.calls["layers.0"], replay.calls["layers.1"]
    assert replay.saved_in == {one.inputs[0]: ("layers.0",), one.outputs[0]: ("layers.1", "")}
    assert two.inputs == one.outputs


# tick 1: x, outside of blocks. outer runs from tick 1 to 9 and calls one (ticks 2 to 5) and two (ticks 6 to 8).
#   one makes h at 3 and returns y, made at 4; two is given y, makes z at 7 and returns it; outer returns z.
X, H, Y, Z = range(4)
BORN = np.array([1, 3, 4, 7], dtype=np.int64)
CALLS = {
    "outer": [Call(first=1, end=9, inputs=(X,), outputs=(Z,))],
    "outer.one": [Call(first=2, end=5, inputs=(X,), outputs=(Y,))],
    "outer.two": [Call(first=5, end=8, inputs=(Y,), outputs=(Z,))],
}
USED = {X: 9, Y: 8}
CHAINED = {"outer.one": "outer.two"}


def test_what_is_made_is_gone_with_its_call_and_what_is_returned_with_the_call_around() -> None:
    x, h, y, z = let_go(CALLS, USED, BORN, {}).tolist()
    assert x == NEVER, "made outside of blocks"
    assert (h, y) == (5 + 1, 9 + 1)
    assert z == NEVER, "outer returns it to nobody that is known"


def test_in_a_chain_an_output_is_gone_when_the_block_that_alone_is_given_it_returns() -> None:
    assert let_go(CALLS, USED, BORN, CHAINED).tolist() == [NEVER, 6, 8 + 1, NEVER]


def test_an_unused_output_stays_until_the_next_block_of_its_chain_returns() -> None:
    assert let_go(CALLS, {}, BORN, CHAINED)[Y] == 8 + 1
    assert let_go(CALLS, {}, BORN, {"outer.one": "elsewhere"})[Y] == 9 + 1, "or to the end of the call around"


CHAIN = Chain(n_blocks=3)
RUN = measured(CHAIN)
REPLAY = Replay.of(RUN, None)


def test_a_block_leaves_what_it_saves_and_keeps_what_it_is_given() -> None:
    (call,) = saved_by_calls(REPLAY, ("layers.1",), stops_early=True)
    (own,) = REPLAY.calls["layers.1"]
    assert REPLAY.size[call.entries].sum() == CHAIN.saved
    assert call.inputs == own.inputs and not call.outputs, "others may save its output"
    assert (call.freed_at < call.backward_begins).all()
    assert call.rerun_bytes == CHAIN.scratch + CHAIN.saved and call.late_bytes == 0


def relu_chain() -> Measurement:
    """Block a makes h, then s, then y, and saves all three; b, given y, makes z of it and saves nothing of it."""
    book = Book()
    x = book.hold("input", "", MIB)
    book.phase("forward")
    h, s, y = (book.alloc("saved activation", "a", size * MIB) for size in (8, 2, 1))
    book.calls.append(("a", 0, book.tick, (x,), (y,)))
    z = book.alloc("temporary", "b", MIB)
    book.calls.append(("b", book.tick - 1, book.tick, (y,), (z,)))
    book.phase("backward")
    gradient = book.alloc("temporary", "a", MIB)
    for entry in (y, s, h, gradient, z):
        book.free(entry)
    return msgspec.structs.replace(measured(), allocations=book.close(), phases=tuple(book.spans), blocks=())


def leaving(known: ModelGraph | None) -> dict[int, int]:
    """Size in MiB and first tick at which it would be gone, of what block a would not keep."""
    replay = Replay.of(relu_chain(), known)
    (call,) = saved_by_calls(replay, ("a",), stops_early=True)
    return dict(zip((replay.size[call.entries] // MIB).tolist(), call.freed_at.tolist()))


def test_the_last_is_there_until_something_is_made_of_it() -> None:
    """Ticks 1, 2 and 3 make h, s and y: h leaves behind s, s behind y; y may be saved by others."""
    assert leaving(None) == {8: 2 + 1, 2: 3 + 1}


def test_an_output_that_nobody_else_saves_leaves_with_the_block_that_is_given_it() -> None:
    alone, shared = (graph_of(block("a", "B", outputs_saved_outside=(outside,))) for outside in (False, True))
    assert leaving(alone)[1] == 4 + 1, "b ends at tick 4"
    assert 1 not in leaving(shared)


def test_a_rerun_frees_nothing_before_it_has_made_the_output_that_backward_reads() -> None:
    """Tick 3 makes y, which is saved: h, which forward let go at tick 2, is there until tick 4 of the rerun."""
    replay = Replay.of(relu_chain(), graph_of(block("a", "B", outputs_saved_outside=(False,))))
    (call,) = saved_by_calls(replay, ("a",), stops_early=True)
    early = replace(call, freed_at=np.array([2, 3, 5]))
    assert freed_again_at(replay, early).tolist() == [4, 4, 5]


@pytest.mark.parametrize(("died", "ends"), [([10, 30], 11), ([10, 11], 11), ([10, 4], 10), ([4, 4], 5)])
def test_a_backward_ends_with_its_tensors_and_a_tick_after_them_for_an_output(died: list[int], ends: int) -> None:
    """Entry 1 is an output, which other code may hold longer; backward lasts until tick 5 at least."""
    assert calls._ends(np.array(died), np.array([0, 1]), (1,), 5) == ends


@pytest.mark.parametrize(("savers", "is_last"), [
    (("a",), True), (("a.first",), True), (("elsewhere", "a"), True), ((), False), (("elsewhere", "ab"), False),
])  # fmt: skip
def test_a_backward_ends_a_tick_later_where_the_block_saves_its_input(
    savers: tuple[str, ...], *, is_last: bool
) -> None:
    """What reads the input ran first in forward, and so runs last in backward: after the last gradient is there."""
    book = Book()
    x = book.hold("input", "", MIB)
    book.phase("forward")
    s, y = (book.alloc("saved activation", "a", MIB) for _ in "sy")
    book.calls.append(("a", 0, book.tick, (x,), (y,)))
    silent = book.alloc("saved activation", "b", MIB)
    book.calls.append(("b", book.tick - 1, book.tick, (x,), ()))
    book.phase("backward")
    gradient = book.alloc("temporary", "a", MIB)
    for entry in (silent, y, s, gradient):
        book.free(entry)
    book.alloc("gradient", "a", MIB)
    last = book.tick
    run = msgspec.structs.replace(measured(), allocations=book.close(), phases=tuple(book.spans), blocks=())
    known = graph_of(*(block(fqn, "B", inputs_saved_in=(savers,)) for fqn in "ab"))
    (call,) = saved_by_calls(Replay.of(run, known), ("a",), stops_early=True)
    assert call.backward_ends == last + is_last
    known = graph_of(*(block(fqn, "B", inputs_saved_in=(("b",),)) for fqn in "ab"))
    (call,) = saved_by_calls(Replay.of(run, known), ("b",), stops_early=True)
    assert call.backward_ends == call.backward_begins, "its backward allocates nothing"


def test_a_rerun_copies_running_statistics_but_for_the_counter() -> None:
    book = Book()
    x = book.hold("input", "", MIB)
    for n_bytes in (16, 8):
        book.hold("buffer", "a.norm", n_bytes)
    book.phase("forward")
    y = book.alloc("saved activation", "a.norm", MIB)
    book.calls += [("a.norm", 0, 2, (x,), (y,)), ("a", 0, 2, (x,), (y,))]
    book.alloc("temporary", "a", MIB)
    book.phase("backward")
    for entry in (book.alloc("temporary", "a.norm", MIB), y):
        book.free(entry)
    run = msgspec.structs.replace(measured(), allocations=book.close(), phases=tuple(book.spans), blocks=())
    graph = graph_of(block("a", "B"), block("a.norm", "BatchNorm1d", traits=("running_statistics",)))
    (call,) = calls_of(Replay.of(run, graph), graph, Unit(blocks=("a",)), Policy(running_stats="once"))
    assert [n_bytes for *_, n_bytes in call.copies] == [16] and call.statistics_bytes == 24


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 20), st.integers(1, 9)), max_size=10))
def test_most_at_once_is_found_by_walking_all_ticks(rows: list[tuple[int, int, int]]) -> None:
    size, born, length = (np.array(column, dtype=np.int64) for column in (zip(*rows) if rows else ([], [], [])))
    held = [sum(n for n, b, more in rows if b <= tick < b + more) for tick in range(31)]
    assert most_at_once(size, born, born + length) == max(held)


def told(units: list[Unit]) -> Forecast:
    return Forecaster(two_blocks()).forecast(Policy(units=tuple(units), preserve_rng_state=False))


def keeping(*ops: str) -> list[Unit]:
    return [Unit(blocks=(name,), action="save_ops", save_ops=ops) for name in "ab"]


ALL = [Unit(blocks=("a",)), Unit(blocks=("b",))]
KEPT = 1 + 2 * (8 + 2 + 1)


def test_results_that_backward_needs_stay_and_the_rest_comes_back() -> None:
    """Of each block 2 MiB (s) leave instead of 10."""
    assert told(ALL).saved_after_forward_bytes == (KEPT - 20) * MIB
    foretold = told(keeping("aten.mm.default"))
    assert foretold.saved_after_forward_bytes == (KEPT - 4) * MIB
    assert foretold.freed_bytes == {"a": 2 * MIB, "b": 2 * MIB}


def test_results_that_nobody_needs_stay_as_well() -> None:
    """t was gone when its block returned; now it waits for the rerun, which it was kept for."""
    foretold = told(keeping("aten.sin.default"))
    assert foretold.saved_after_forward_bytes == (KEPT - 20 + 8) * MIB
    assert foretold.freed_bytes == {"a": 6 * MIB, "b": 6 * MIB}


def test_a_rerun_makes_nothing_of_what_was_kept() -> None:
    """The peak is b running again with the gradient there: without h, 1 + 1 + 1 + 1 kept and 8 + 4 + 2 made again."""
    plain = told(ALL)
    assert plain.step_peak_bytes == (1 + 1 + 1 + 8 + 4 + 2) * MIB
    # Everything of both blocks is there from forward on, t included, when the first gradient comes on top.
    kept = keeping("aten.mm.default", "aten.sin.default", "aten.exp.default")
    assert told(kept).step_peak_bytes == (1 + 2 * 15 + 1) * MIB
    # h and s of both, x and y, y of b or its gradient; of b the 4 MiB of t come once more.
    assert told(keeping("aten.mm.default", "aten.exp.default")).step_peak_bytes == (KEPT + 4) * MIB


def test_an_operator_that_never_ran_changes_nothing_and_a_view_is_not_foretold() -> None:
    assert told(keeping("aten.bmm.default")).step_peak_bytes == told(ALL).step_peak_bytes
    assert told(keeping("aten.view.default")).step_peak_bytes is None
    assert results_of_views(("aten.view.default", "aten.mm.default")) == ("aten.view.default",)


def test_flops_of_kept_results_are_not_spent_again() -> None:
    """Half of the block's FLOPs are mm, of which half lie behind the last saved tensor."""
    of_operators = {
        "op_flops": {"aten.mm.default": 50, "aten.bmm.default": 50},
        "late_op_flops": {"aten.mm.default": 25},
    }
    of = graph_of(block("layers.0", "B", forward_flops=100, rerun_flops=75, **of_operators))
    share = 1 / 18

    def ratio(*ops: str, of: ModelGraph | None = of, **options: bool) -> float | None:
        unit = Unit(blocks=("layers.0",), action="save_ops", save_ops=ops)
        return Forecaster(measured(), of).forecast(Policy(units=(unit,), **options)).flop_ratio

    assert ratio("aten.mm.default") == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.mm.default", early_stop=False) == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.bmm.default") == pytest.approx(1 + 0.25 * share)
    assert ratio("aten.mm.default", of=None) is None


IN_PARTS = Chain(n_blocks=2, saved=12 * MIB, n_parts=2, scratch=4 * MIB)
REPLAY_IN_PARTS = Replay.of(measured(IN_PARTS), None)
NESTED = Policy.recompute(["layers.0", "layers.0.inner", "layers.1"])


def nest(known: ModelGraph | None = None) -> Nest:
    calls = {unit: saved_by_calls(REPLAY_IN_PARTS, unit.blocks, stops_early=True) for unit in NESTED.units}
    return nest_of(NESTED, calls, known, stash_bytes=7)


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
    tree = nest(graph_of(*blocks))
    assert tree.stops_inside[0] is stops
    inner = tree.calls[2]
    assert np.array_equal(inner.entries, tree.calls[0].entries)
    held = rerun_bytes(REPLAY_IN_PARTS, tree, 0)
    assert held == IN_PARTS.scratch + 7 if stops else held > IN_PARTS.scratch + 7


def test_each_rerun_holds_the_present_state_of_the_generator_beside_those_that_wait() -> None:
    """Of layers.0, layers.1 and the unit in layers.0. The state of layers.1 is gone when layers.0 runs again, whose
    rerun stashes that of its inner unit a second time."""
    bare, stashing = (replace(nest(), stash_bytes=n_bytes) for n_bytes in (0, 7))
    pairs = zip(simulate(REPLAY_IN_PARTS, stashing, None).reruns(), simulate(REPLAY_IN_PARTS, bare, None).reruns())
    assert [held - plain for (_, held), (_, plain) in pairs] == [(2 + 1 + 1) * 7, (3 + 1) * 7, (2 + 1) * 7]


def test_statistics_that_a_rerun_updates_are_held_with_units_inside_as_well() -> None:
    tree = nest()
    outer = replace(tree.calls[0], statistics_bytes=5)
    copying = replace(tree, calls=(outer, *tree.calls[1:]))
    assert rerun_bytes(REPLAY_IN_PARTS, copying, 0) == rerun_bytes(REPLAY_IN_PARTS, tree, 0) + 5


def test_without_units_inside_all_of_it_is_held() -> None:
    tree = nest()
    assert rerun_bytes(REPLAY_IN_PARTS, tree, 1) == IN_PARTS.scratch + IN_PARTS.saved == tree.calls[1].rerun_bytes
    (call,) = saved_by_calls(REPLAY_IN_PARTS, ("layers.0",), stops_early=False)
    assert call.rerun_bytes == IN_PARTS.scratch + IN_PARTS.saved + IN_PARTS.output


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
    policy = Policy.recompute([f"layers.{i}" for i in sorted(taken) if i < chain.n_blocks])
    calls = {unit: saved_by_calls(replay, unit.blocks, stops_early=True) for unit in policy.units}
    simulation = simulate(replay, nest_of(policy, calls, None, stash_bytes=0), run.forward_end_tick)
    again = {max(call.backward_begins - 1, 0) for own in calls.values() for call in own}
    for tick, n_bytes in enumerate(simulation.line.tolist()):
        held = int(replay.size[simulation.held_at(tick)].sum())
        assert held == n_bytes or (tick in again and held < n_bytes)
