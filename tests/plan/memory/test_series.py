"""Series over a timeline, by arrays, are those that counting entry by entry gives."""

from __future__ import annotations

from hypothesis import given, settings

from explorer.plan.memory.ledger import alive, belongs, events, held, held_by_role, peak_tick
from explorer.plan.names import is_within
from explorer.record import Allocations
from tests.timelines import alive_at
from tests.view.builders import Chain, logs, measured


@settings(max_examples=40, deadline=None)
@given(logs())
def test_series_agree_with_the_record(log: Allocations) -> None:
    assert held(log).tolist() == log.held_bytes.tolist()
    assert peak_tick(log) == log.peak_tick
    assert held_by_role(log).sum(axis=0).tolist() == log.held_bytes.tolist()
    for tick in range(log.n_ticks + 1):
        assert alive(log, tick).tolist() == alive_at(log, tick)


@settings(max_examples=30, deadline=None)
@given(logs())
def test_an_event_is_the_entry_born_or_freed_there(log: Allocations) -> None:
    event = events(log)
    for tick in range(1, log.n_ticks + 1):
        entry, sign = int(event.entry[tick]), int(event.sign[tick])
        assert (log.born if sign > 0 else log.died)[entry] == tick
        assert log.held_bytes[tick] - log.held_bytes[tick - 1] == sign * log.n_bytes[entry]


def test_a_block_holds_what_lies_below_it_and_no_more() -> None:
    assert is_within("layers.1.inner", "layers.1") and is_within("layers.1", "layers.1") and is_within("x", "")
    assert not is_within("layers.10", "layers.1") and not is_within("layers", "layers.1")
    log = measured(Chain(n_blocks=12)).allocations
    mine = belongs(log, "layers.1")
    assert {log.blocks[log.block[i]] for i in mine.nonzero()[0]} == {"layers.1", "layers.1.inner"}
