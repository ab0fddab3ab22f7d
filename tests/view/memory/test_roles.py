"""Roles stacked at any drawn point are the total, to the byte."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from explorer.record import ROLES, Allocations, Measurement
from explorer.view.drawing.colours import ROLE_COLOURS
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import NO_TIMELINE
from tests.graphs import alive_at
from tests.view.builders import MIB, Chain, logs, measured, runs
from tests.view.memory.stacks import assert_adds_up, stack_of


@settings(max_examples=12, deadline=None)
@given(runs())
def test_bands_add_up_to_the_total(run: Measurement) -> None:
    assert_adds_up(roles(run), run.step_peak_bytes)


@settings(max_examples=12, deadline=None)
@given(logs())
def test_bands_add_up_for_any_order_of_events(log: Allocations) -> None:
    if log.n_ticks and max(log.held_bytes):
        run = msgspec.structs.replace(measured(), allocations=log, phases=())
        for block in (None, "a", "", "missing"):
            assert_adds_up(roles(run, block=block), max(log.held_bytes))


def test_the_order_is_that_of_roles_bottom_first() -> None:
    names = stack_of(roles(measured(recompute=[1])))[2]
    assert names == [role for role in ROLES if role in names]
    assert {"parameter", "saved activation", "recomputed", "gradient"} <= set(names)


def test_recomputed_is_there_only_with_a_policy() -> None:
    assert "recomputed" not in stack_of(roles(measured()))[2]


def test_the_unattributed_band_is_visible() -> None:
    run = measured()
    log = run.allocations
    hidden = msgspec.structs.replace(log, role=type(log.role)("q", [ROLES.index("unattributed")] * len(log.role)))
    fig = roles(msgspec.structs.replace(run, allocations=hidden)).figure
    (band,) = [trace for trace in fig.data if trace.stackgroup]
    assert band.name == "unattributed" and band.fillpattern.shape == "x"


def test_a_block_lies_at_the_bottom_in_full_colour() -> None:
    run = measured(recompute=[3])
    fig = roles(run, block="layers.3").figure
    bands = [trace for trace in fig.data if trace.stackgroup]
    shown = [band for band in bands if band.showlegend]
    assert bands[: len(shown)] == shown
    mine = sum(np.array(band.y) for band in shown) * MIB
    ticks = [point[1] for point in fig.data[-1].customdata]
    log = run.allocations
    for tick, size in zip(ticks, mine):
        alive = [i for i in alive_at(log, tick) if log.blocks[log.block[i]].startswith("layers.3")]
        assert size == pytest.approx(sum(log.n_bytes[i] for i in alive), rel=1e-12)


def test_a_block_whose_name_begins_alike_is_another_block() -> None:
    run = measured(Chain(n_blocks=12))
    fig = roles(run, block="layers.1").figure
    (parameters, *_) = [trace for trace in fig.data if trace.stackgroup and trace.name == "parameter"]
    assert parameters.y[0] == 3


def test_colours_are_those_of_the_roles() -> None:
    bands = [trace for trace in roles(measured(recompute=[0])).figure.data if trace.stackgroup]
    assert len(bands) > 2
    for trace in bands:
        red, green, blue = (int(ROLE_COLOURS[trace.name][i : i + 2], 16) for i in (1, 3, 5))
        assert trace.fillcolor.startswith(f"rgba({red}, {green}, {blue},")


def test_table_twin_adds_up() -> None:
    run = measured(recompute=[0, 1])
    *rows, total = roles(run).rows()
    assert total["at the peak (bytes)"] == run.step_peak_bytes == sum(row["at the peak (bytes)"] for row in rows)
    assert [row["role"] for row in rows] == list(ROLES)


def test_not_measured() -> None:
    blind = msgspec.structs.replace(measured(), allocations=None)
    assert roles(blind).figure.layout.annotations[0].text == roles(blind).alt == NO_TIMELINE
    assert roles(blind).rows() == [{"role": NO_TIMELINE}]
