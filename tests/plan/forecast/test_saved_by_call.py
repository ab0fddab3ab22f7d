"""What one call leaves behind, on a chain whose sizes a pencil knows."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import most_at_once, saved_by_calls
from explorer.record import Measurement, ModelGraph
from tests.graphs import block
from tests.plan.why.test_peak import graph
from tests.view.builders import MIB, Book, Chain, measured

CHAIN = Chain(n_blocks=3)
RUN = measured(CHAIN)
REPLAY = Replay.of(RUN, None)


def test_a_block_leaves_what_it_saves_and_keeps_what_it_is_given() -> None:
    (call,) = saved_by_calls(REPLAY, ("layers.1",), stops_early=True)
    (own,) = REPLAY.calls["layers.1"]
    assert REPLAY.size[call.entries].sum() == CHAIN.saved
    assert call.inputs == own.inputs and not call.outputs, "others may save its output"
    assert (call.leaves < call.begins).all()
    assert call.again_bytes == CHAIN.scratch + CHAIN.saved and call.late_bytes == 0


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
    return dict(zip((replay.size[call.entries] // MIB).tolist(), call.leaves.tolist()))


def test_the_last_is_there_until_something_is_made_of_it() -> None:
    """Ticks 1, 2 and 3 make h, s and y: h leaves behind s, s behind y; y may be saved by others."""
    assert leaving(None) == {8: 2 + 1, 2: 3 + 1}


def test_an_output_that_nobody_else_saves_leaves_with_the_block_that_is_given_it() -> None:
    alone = ModelGraph(model=graph().model, blocks=(block("a", "B", outputs_saved_outside=(False,)),), edges=())
    assert leaving(alone)[1] == 4 + 1, "b ends at tick 4"
    shared = ModelGraph(model=graph().model, blocks=(block("a", "B", outputs_saved_outside=(True,)),), edges=())
    assert 1 not in leaving(shared)


def test_a_segment_leaves_block_by_block_and_comes_back_at_once() -> None:
    (call,) = saved_by_calls(REPLAY, ("layers.0", "layers.1"), stops_early=True)
    (one,), (two,) = REPLAY.calls["layers.0"], REPLAY.calls["layers.1"]
    assert REPLAY.size[call.entries].sum() == 2 * CHAIN.saved + CHAIN.output, "and the border between them"
    assert call.inputs == one.inputs
    border = call.entries == one.outputs[0]
    assert call.leaves[border].tolist() == [two.end + 1] and call.leaves[~border].min() <= one.end


def test_a_block_that_never_ran_leaves_nothing() -> None:
    assert saved_by_calls(REPLAY, ("elsewhere",), stops_early=True) == []


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 20), st.integers(1, 9)), max_size=10))
def test_most_at_once_is_found_by_walking_all_ticks(rows: list[tuple[int, int, int]]) -> None:
    size, born, length = (np.array(column, dtype=np.int64) for column in (zip(*rows) if rows else ([], [], [])))
    held = [sum(n for n, b, more in rows if b <= tick < b + more) for tick in range(31)]
    assert most_at_once(size, born, born + length) == max(held)
