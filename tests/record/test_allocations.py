"""The bytes held at each tick, and the ledger of a moment: its cells add up by role and by block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.record.allocations import ROLES, Allocations, Ledger, LedgerCell
from explorer.record.base import column
from tests.graphs import alive_at

LIVES = st.tuples(st.integers(1, 100), st.integers(0, 6), st.integers(1, 6))


def log_of(entries: list[tuple[int, int, int]], n_ticks: int = 12) -> Allocations:
    """(bytes, born, ticks alive) an entry."""
    n = len(entries)
    return Allocations(
        n_ticks=n_ticks,
        n_bytes=column(size for size, _, _ in entries),
        born=column(born for _, born, _ in entries),
        died=column(born + lived for _, born, lived in entries),
        role=column([0] * n),
        block=column([0] * n),
        op=column([0] * n),
        blocks=("",),
        ops=("",),
        time_ns=column(),
    )


@given(st.lists(LIVES, max_size=12))
def test_each_tick_holds_what_is_alive_then(entries: list[tuple[int, int, int]]) -> None:
    log = log_of(entries)
    held = [sum(log.n_bytes[i] for i in alive_at(log, tick)) for tick in range(log.n_ticks + 1)]
    assert list(log.held_bytes) == held
    assert log.peak_tick == held.index(max(held))


def test_what_lives_to_the_end_is_held_at_the_last_tick() -> None:
    log = log_of([(7, 0, 4), (5, 2, 2)], n_ticks=3)
    assert list(log.held_bytes) == [7, 7, 12, 12] and log.peak_tick == 2


CELLS = st.builds(
    LedgerCell,
    role=st.sampled_from(ROLES),
    block=st.sampled_from(["", "a", "b"]),
    n_bytes=st.integers(1, 99),
    n_allocations=st.just(1),
    largest_op=st.just(""),
)


@given(st.lists(CELLS, max_size=8))
def test_both_ways_add_up(cells: list[LedgerCell]) -> None:
    ledger = Ledger(
        tick=1, phase=None, phase_block="", phase_share=None, at_block="", is_peak=False, cells=tuple(cells)
    )
    total = sum(cell.n_bytes for cell in cells)
    assert ledger.total_bytes == sum(ledger.by_role.values()) == sum(ledger.by_block.values()) == total
    assert tuple(ledger.by_role) == ROLES
    assert list(ledger.by_block.values()) == sorted(ledger.by_block.values(), reverse=True)
    assert set(ledger.by_block) == {cell.block for cell in cells}
