"""Series, ledger and the words for a moment agree with the record, byte by byte."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from explorer.errors import BadInput
from explorer.plan.memory.ledger import (
    alive,
    belongs,
    events,
    held,
    held_by_role,
    holders,
    in_place,
    ledger,
    peak_tick,
    place,
)
from explorer.record import ROLES, Allocations, Measurement
from explorer.record.allocations import Ledger, LedgerCell, Phase, Role
from tests.graphs import alive_at
from tests.view.builders import MIB, Chain, logs, measured, runs


@settings(max_examples=30, deadline=None)
@given(logs())
def test_the_ledger_adds_up_at_every_tick(log: Allocations) -> None:
    run = msgspec.structs.replace(measured(), allocations=log, phases=())
    for tick in range(log.n_ticks + 1):
        at = ledger(run, tick)
        assert at.total_bytes == log.held_bytes[tick] == sum(at.by_role.values()) == sum(at.by_block.values())
        assert sum(cell.n_allocations for cell in at.cells) == len(alive_at(log, tick))


@settings(max_examples=30, deadline=None)
@given(runs())
def test_the_default_is_the_peak(run: Measurement) -> None:
    at = ledger(run)
    assert at.is_peak and at.total_bytes == run.step_peak_bytes and at.phase == run.peak_phase
    assert list(at.by_role) == list(ROLES)


def test_largest_cell_first_and_named_by_its_operator() -> None:
    top = ledger(measured(Chain(optimizer=False), recompute=range(6))).cells[0]
    assert (top.role, top.block, top.n_allocations, top.largest_op) == ("recomputed", "layers.0.inner", 2, "aten::gelu")
    assert ledger(measured(), 0).cells[0].largest_op == ""


def test_the_place_within_backward_counts_the_recomputes_inside() -> None:
    run = measured(recompute=[0, 2, 4])
    spans = [span for span in run.phases if span.phase == "backward"]
    assert ledger(run, spans[0].first_tick).phase_share == 0
    assert ledger(run, spans[-1].end_tick - 1).phase_share == 1
    assert ledger(run, spans[1].first_tick).phase_share == 0.24
    again = next(span for span in run.phases if span.phase == "recompute")
    assert ledger(run, again.first_tick).phase_block == again.block == "layers.4"


def test_a_tick_outside_the_step_is_refused() -> None:
    run = measured()
    with pytest.raises(BadInput, match=f"Tick {run.allocations.n_ticks + 1} was asked for"):
        ledger(run, run.allocations.n_ticks + 1)
    with pytest.raises(BadInput, match="no memory timeline"):
        ledger(msgspec.structs.replace(run, allocations=None))


@settings(max_examples=30, deadline=None)
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
    log = measured(Chain(n_blocks=12)).allocations
    mine = belongs(log, "layers.1")
    assert {log.blocks[log.block[i]] for i in mine.nonzero()[0]} == {"layers.1", "layers.1.inner"}


def at(phase: Phase | None, share: float | None = 0.5, *cells: tuple[Role, str, int], block: str = "head") -> Ledger:
    rows = tuple(
        LedgerCell(role=role, block=fqn, n_bytes=size * MIB, n_allocations=1, largest_op="")
        for role, fqn, size in cells
    )
    again = "layers.0" if phase == "recompute" else ""
    return Ledger(
        tick=1, phase=phase, phase_block=again, phase_share=share, at_block=block, is_peak=True, cells=rows
    )  # fmt: skip


@pytest.mark.parametrize(("moment", "words"), [
    (at("forward", 0.95), "at the end of forward in head"),
    (at("forward", 0.05), "at the start of forward in head"),
    (at("backward", 0.5, block=""), "in the middle of backward"),
    (at("recompute"), "in the recompute of layers.0"),
    (at("optimizer"), "in the optimizer step"),
    (at("between"), "in the loop's own code between the phases"),
    (at(None, None), "in the time before the step"),
])  # fmt: skip
def test_where_a_moment_lies(moment: Ledger, words: str) -> None:
    assert in_place(moment) == words and words.endswith(place(moment))


def test_the_roles_that_hold_most_and_the_block_of_each() -> None:
    moment = at(
        "forward", 0.5, ("saved activation", "layers.0", 6), ("gradient", "head", 5),
        ("saved activation", "layers.1", 3), ("input", "", 2), ("parameter", "head", 1),
    )  # fmt: skip
    assert holders(moment) == "saved activation 9.0 MiB (most in layers.0), gradient 5.0 MiB (in head), input 2.0 MiB"
