"""The ledger is exact at every tick, and says where the peak lies."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from explorer.errors import BadInput
from explorer.plan.memory.ledger import ledger
from explorer.record import ROLES, Allocations, Measurement
from explorer.record.allocations import Ledger
from explorer.record.base import from_msgpack, to_msgpack
from tests.timelines import alive_at
from tests.view.builders import Chain, logs, measured, runs


@settings(max_examples=40, deadline=None)
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


def test_a_ledger_is_a_record() -> None:
    at = ledger(measured())
    assert from_msgpack(to_msgpack(at), Ledger) == at
