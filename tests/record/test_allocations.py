"""Held bytes are a running sum over the entries, and the peak is its first maximum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.record.allocations import Allocations
from explorer.record.base import column
from tests.timelines import alive_at

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
