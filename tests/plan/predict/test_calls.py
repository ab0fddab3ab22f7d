"""What a call leaves behind: on the textbook chain, and with kept results on a timeline to follow by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.predict.calls import most_at_once, results_of_views, saved_by_calls
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.replay import Replay
from explorer.record import Measurement, ModelGraph, Policy, Unit
from explorer.record.plan import Forecast
from tests.graphs import block
from tests.graphs import block as graph_block
from tests.plan.predict.two_blocks import two_blocks
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
    known = graph_block(
        "layers.0", "B", forward_flops=100, rerun_flops=75, op_flops={"aten.mm.default": 50, "aten.bmm.default": 50},
        late_op_flops={"aten.mm.default": 25},
    )  # fmt: skip
    of = ModelGraph(model=graph().model, blocks=(known,), edges=())
    share = 1 / 18

    def ratio(*ops: str, of: ModelGraph | None = of, **options: bool) -> float | None:
        unit = Unit(blocks=("layers.0",), action="save_ops", save_ops=ops)
        return Forecaster(measured(), of).forecast(Policy(units=(unit,), **options)).flop_ratio

    assert ratio("aten.mm.default") == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.mm.default", early_stop=False) == pytest.approx(1 + 0.5 * share)
    assert ratio("aten.bmm.default") == pytest.approx(1 + 0.25 * share)
    assert ratio("aten.mm.default", of=None) is None
