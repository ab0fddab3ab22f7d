"""Offload of a hand-made step, row by row: until when a tensor stays, what comes back when, and what the host holds."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.plan.predict.offloaded import Offloaded, as_calls, with_offload
from explorer.plan.predict.replay import SUM, Replay
from explorer.record import Measurement, Unit
from explorer.record.allocations import Saves
from explorer.record.base import column
from tests.graphs import block, graph_of
from tests.view.builders import Book, measured

W, X, S, Y, _, Z = range(6)
A, B = (Unit(blocks=(fqn,), action="offload") for fqn in "ab")
GRAPH = graph_of(
    block("a", "B", outputs_saved_outside=(True,)),
    block("b", "B", follows="a", outputs_saved_outside=(False,)),
    chain=("a", "b"),
)
Row = tuple[int, str, int, int, int, int, int]
"""As in Saves."""
ROWS: list[Row] = [
    (W, "a", 0, 64, 0, 10, 11),
    (S, "a", 1, 80, 1, 10, 11),
    (Y, "a", 2, 10, 2, 8, 9),
    (Y, "b", 2, 10, 2, 7, 8),
    (Z, "b", 3, 40, 4, 5, 6),
]
FREED = [(64, 0, 19), (16, 0, 19), (80, 1, 12), (10, 2, 10), (20, 3, 5), (40, 4, 7)]
"""Bytes, birth and death of what is there with everything kept, before the temporaries of backward."""


def step(rows: list[Row], *, holds_s: bool = False) -> Measurement:
    """Block a makes s (tick 1) and y (2) of x and a weight; b makes z (4) of y. Backward reads z, y and s.

    Tensors of backward are born at ticks 6, 8, 9, 11, and the sum of a gradient at 13. With `holds_s` other code holds
    s to the end.
    """
    book = Book()
    book.hold("parameter", "a", 64)
    x = book.hold("input", "", 16)
    book.phase("forward")
    s, y = (book.alloc("saved activation", "a", size) for size in (80, 10))
    book.calls.append(("a", 0, book.tick, (x,), (y,)))
    scratch, z = book.alloc("temporary", "b", 20), book.alloc("saved activation", "b", 40)
    book.free(scratch)
    book.calls.append(("b", 2, book.tick, (y,), (z,)))
    book.phase("backward")
    gradients = [book.alloc("temporary", "b", 1)]
    book.free(z)
    gradients += [book.alloc("temporary", "b", 1), book.alloc("temporary", "a", 1)]
    book.free(y)
    gradients.append(book.alloc("temporary", "a", 1))
    if not holds_s:
        book.free(s)
    gradients.append(book.alloc("temporary", "a", 1, SUM))
    for entry in gradients:
        book.free(entry)
    log = book.close()
    columns = zip(*((entry, log.blocks.index(fqn), *rest) for entry, fqn, *rest in rows))
    saves = Saves(**dict(zip(Saves.__struct_fields__, map(column, columns))))
    return replace(
        measured(), allocations=replace(log, saves=saves), phases=tuple(book.spans), blocks=()
    )  # fmt: skip


def offloaded(run: Measurement, *units: Unit) -> tuple[Offloaded, list[tuple[int, int, int]], list[tuple[int, int]]]:
    """With the lives of the tensors of forward, and those of the copies."""
    replay = Replay.of(run, GRAPH)
    assert replay is not None
    result = with_offload(run, replay, units)
    log = result.run.allocations
    assert log is not None
    lives = list(zip(log.n_bytes, log.born, log.died))
    return result, lives[:6], [(born, died) for _, born, died in lives[11:]]


def test_a_tensor_stays_until_the_last_operation_on_the_device_has_read_it() -> None:
    """s is let go at tick 3, when a returns; y at 6, when b returns, if both offload it. Other code may hold z."""
    run = step(ROWS)
    for units, died_s, died_y, host, outside in (
        ((A,), 3, 8 + 1, 80 + 10, (True, False)),
        ((B,), 12, 9 + 1, 10 + 40, (False, False)),
        ((A, B), 3, 6, 80 + 10 + 10 + 40, (False, False)),
    ):
        result, lives, copies = offloaded(run, *units)
        assert lives == [*FREED[:2], (80, 1, died_s), (10, 2, died_y), *FREED[4:]]
        assert copies == [(11, 12), (9, 10)] * (A in units) + [(8, 9), (6, 7)] * (B in units)
        assert (result.host_peak_bytes, result.moved_bytes) == (host, 2 * host)
        assert result.saved_outside == {"a": outside[:1], "b": outside[1:]}


def test_a_cast_weight_stays_until_forward_ends() -> None:
    run = step(ROWS)
    assert run.allocations is not None
    cast = replace(run.allocations, weight_casts=column([S]))
    lives = offloaded(replace(run, allocations=cast, spec=replace(run.spec, autocast="bfloat16")), A)[1]
    assert lives[S] == (80, 1, 5)


@pytest.mark.parametrize(("released", "died"), [(11, 18), (13, 18), (18, 3)])
def test_what_is_there_at_the_end_is_freed_only_if_autograd_still_holds_it(released: int, died: int) -> None:
    """The last tensor is born at tick 12, and tick 18 is the end."""
    rows: list[Row] = [(S, "a", 1, 80, 1, 10 if released < 18 else 18, released)]
    assert offloaded(step(rows, holds_s=True), A)[1][S] == (80, 1, died)


@pytest.mark.parametrize(("reads", "copies"), [
    ([(10, 11)], [(11, 12)]),
    ([(8, 9), (10, 11)], [(9, 10), (11, 12)]),
    ([(7, 9), (8, 11)], [(8, 12)]),  # one operation reads it twice
    ([(8, 11), (9, 9)], [(9, 12)]),  # the second ends first
    ([(7, 8), (8, 9)], [(8, 9), (9, 10)]),  # one after the other
    ([(10, 13)], [(11, 12)]),  # the sum comes after the operation
    ([(11, 12)], [(11, 12)]),  # the operation makes nothing
    ([(5, 6)], [(6, 7)]),
    ([(19, 12)], []),  # never read in this step
])  # fmt: skip
def test_each_operation_that_reads_a_view_brings_a_copy(
    reads: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    result, _, found = offloaded(step([(S, "a", 1, 80, 1, *read) for read in reads]), A)
    assert (found, result.moved_bytes) == (copies, 80 * (1 + len(copies)))


@pytest.mark.parametrize(("of_s", "of_y", "peak"), [
    ([(1, 9), (1, 11)], (9, 12), 90),  # until the last release of s
    ([(1, 9), (5, 9)], (2, 3), 90),  # from the first save of s
    ([(1, 9)], (9, 12), 80),  # what is released makes room for what comes at the same tick
    ([(1, 9)], (8, 12), 90),
])  # fmt: skip
def test_the_host_holds_a_view_from_its_first_save_to_its_last_release(
    of_s: list[tuple[int, int]], of_y: tuple[int, int], peak: int
) -> None:
    rows: list[Row] = [(S, "a", 1, 80, saved, 8, released) for saved, released in of_s]
    rows.append((Y, "a", 2, 10, of_y[0], 8, of_y[1]))
    assert offloaded(step(rows), A)[0].host_peak_bytes == peak


def test_a_call_saves_its_input_before_it_makes_anything() -> None:
    """Both rows are of the one call. The batch stays where it is, and is copied all the same."""
    result, lives, copies = offloaded(step([(X, "a", 0, 16, saved, 8, 9) for saved in (0, 1)]), A)
    assert (lives, copies, result.moved_bytes) == (FREED, [(9, 10)], 2 * 16)


@pytest.mark.parametrize(("unit", "freed", "copies"), [
    (A, [(S, 3, 12), (Y, 6, 10)], ((11, 12, 80), (9, 10, 10))), (B, [(Y, 6, 10)], ((8, 9, 10), (6, 7, 40))),
])  # fmt: skip
def test_a_program_counts_what_a_unit_frees_if_all_others_are_offloaded_too(
    unit: Unit, freed: list[tuple[int, int, int]], copies: tuple[tuple[int, int, int], ...]
) -> None:
    run = step(ROWS)
    replay = Replay.of(run, GRAPH)
    assert replay is not None
    *entries, moved = as_calls(run, replay, unit)
    assert [(*one.entries.tolist(), *one.freed_at.tolist(), one.backward_begins) for one in entries] == freed
    assert moved.copies == copies and not any(one.copies for one in entries)
