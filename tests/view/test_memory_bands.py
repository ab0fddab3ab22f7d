"""Stacked bytes by role and by block, the ledger, and bars of blocks."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from explorer.plan.memory.ledger import ledger
from explorer.record import ROLES, Allocations, Measurement
from explorer.view.drawing.axis import MAX_POINTS
from explorer.view.drawing.figure import Chart
from explorer.view.drawing.sketch import TOP, sketch
from explorer.view.memory.blocks import ledger_chart, saved_bytes_chart
from explorer.view.memory.stacked import AGAIN, HEADROOM, MOST_BANDS, REST, by_block, roles
from explorer.view.memory.timeline import NO_TIMELINE, timeline
from tests.graphs import alive_at
from tests.view.builders import MIB, Chain, compared, logs, measured, runs


def stack_of(chart: Chart) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Heights of the bands in bytes, those of the total line, and the bands' names."""
    fig = chart.figure
    bands = [trace for trace in fig.data if trace.stackgroup]
    total = next(trace for trace in fig.data if trace.name == "total")
    unit = {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[fig.layout.yaxis.title.text[-4:-1]]
    assert all(list(band.x) == list(total.x) for band in bands) and len(total.x) <= MAX_POINTS
    return np.array([band.y for band in bands]) * unit, np.array(total.y) * unit, [band.name for band in bands]


def assert_adds_up(chart: Chart, peak_bytes: int | None) -> None:
    """At every drawn point to the byte, and the peak is among those."""
    bands, total, _ = stack_of(chart)
    assert np.rint(bands).sum(axis=0).tolist() == np.rint(total).tolist()
    assert np.rint(total).max() == peak_bytes


def assert_sketched(chart: Chart) -> None:
    """The sketch has the areas, and the first, highest and last point of their outline in a plot 400 pixels high."""
    bands, total, names = stack_of(chart)
    page = sketch(chart, TOP + 400 + chart.figure.layout.margin.b, dark=False)
    assert len(re.findall(r'stroke-width="\.5" fill="rgba', page)) == len(names)
    line = re.search(r'd="M\S+ (\S+?)(H[^"]*)" fill="none"', page)
    assert line is not None
    heights = [float(line[1]), *map(float, re.findall(r"V([-.e\d]+)", line[2]))]
    at_top = total.max() * HEADROOM
    expected = [400 * (1 - size / at_top) for size in (total[0], total.max(), total[-1])]
    assert [heights[0], min(heights), heights[-1]] == pytest.approx(expected, abs=0.06)


def test_bands_cover_the_step_once_and_recompute_is_hatched() -> None:
    run = measured(recompute=[0, 2])
    strips = {trace.name: trace for trace in timeline(run).figure.data if trace.fillpattern.shape is not None}
    assert set(strips) == {span.phase for span in run.phases}
    width = 0.0
    for trace in strips.values():
        xs = [x for x in trace.x if x is not None]
        width += sum(xs[i + 1] - xs[i] for i in range(0, len(xs), 5))
    assert width == run.allocations.n_ticks
    assert strips["recompute"].fillpattern.shape == "/" and strips["forward"].fillpattern.shape == ""
    assert all(strip.fillpattern.bgcolor == strip.fillcolor for strip in strips.values()), "a hatch keeps its colour"


@settings(max_examples=10, deadline=None)
@given(runs())
def test_bands_add_up_to_the_total(run: Measurement) -> None:
    for chart in (by_block(run), roles(run)):
        assert_adds_up(chart, run.step_peak_bytes)
        assert_sketched(chart)


@settings(max_examples=10, deadline=None)
@given(logs())
def test_bands_add_up_for_any_order_of_events(log: Allocations) -> None:
    if log.n_ticks and max(log.held_bytes):
        run = msgspec.structs.replace(measured(Chain(n_blocks=2)), allocations=log, phases=())
        for chart in (by_block(run), *(roles(run, block=block) for block in (None, "a", "", "missing"))):
            assert_adds_up(chart, max(log.held_bytes))


def test_what_stays_lies_at_the_bottom_blocks_in_order_recompute_on_top() -> None:
    names = stack_of(by_block(measured(Chain(n_blocks=4), recompute=[1])))[2]
    blocks = [name for name in names if name.startswith("layers.")]
    assert blocks == sorted(blocks) and len(blocks) == 4
    assert names[0] == REST and names[-1] == AGAIN
    assert AGAIN not in stack_of(by_block(measured(Chain(n_blocks=4))))[2]
    deep = stack_of(by_block(measured(Chain(n_blocks=60))))[2]
    assert len(deep) <= MOST_BANDS + 3 and any(" to " in name for name in deep), "a deep model shares bands"


def test_roles_stand_in_their_order_and_add_up_when_thinned() -> None:
    """All roles are drawn at the same ticks: each thinned on its own would add up to nothing that was ever held."""
    run = measured(Chain(n_blocks=200, n_parts=4), range(0, 200, 3))
    assert run.allocations.n_ticks > MAX_POINTS
    assert_adds_up(roles(run), run.step_peak_bytes)
    names = stack_of(roles(run))[2]
    assert names == [role for role in ROLES if role in names], "bottom first"
    assert {"parameter", "saved activation", "recomputed", "gradient"} <= set(names)
    assert "recomputed" not in stack_of(roles(measured()))[2]


def test_recompute_of_every_block_is_one_band() -> None:
    run = measured(Chain(n_blocks=4), recompute=[0, 2])
    log = run.allocations
    assert log is not None
    bands, _, names = stack_of(by_block(run))
    again = [i for i, role in enumerate(log.role) if role == ROLES.index("recomputed")]
    assert len({log.block[i] for i in again}) >= 2
    most = max(sum(log.n_bytes[i] for i in again if log.born[i] <= t < log.died[i]) for t in range(log.n_ticks + 1))
    assert np.rint(bands[names.index(AGAIN)].max()) == most


def test_words_and_rows_say_the_same_peak() -> None:
    run = measured(Chain(n_blocks=4), recompute=[1])
    chart = by_block(run)
    assert sum(row["at the peak (bytes)"] for row in chart.rows()) == run.step_peak_bytes
    assert chart.alt.startswith("Stacked area chart of bytes by block, recompute on top. At the peak")
    bare = by_block(msgspec.structs.replace(run, allocations=None))
    assert bare.alt == NO_TIMELINE and list(bare.rows()) == [{"band": NO_TIMELINE}]
    *rows, total = roles(run).rows()
    assert total["at the peak (bytes)"] == run.step_peak_bytes == sum(row["at the peak (bytes)"] for row in rows)
    assert [row["role"] for row in rows] == list(ROLES)
    blind = roles(msgspec.structs.replace(run, allocations=None))
    assert blind.figure.layout.annotations[0].text == blind.alt == NO_TIMELINE
    assert blind.rows() == [{"role": NO_TIMELINE}]


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
    fig = roles(measured(Chain(n_blocks=12)), block="layers.1").figure
    parameters = next(trace for trace in fig.data if trace.stackgroup and trace.name == "parameter")
    assert parameters.y[0] == 3, "layers.10 is another block"


@settings(max_examples=12, deadline=None)
@given(runs())
def test_all_bars_and_the_table_add_up_to_the_peak(run: Measurement) -> None:
    at_peak = ledger(run)
    fig = ledger_chart(at_peak).figure
    unit = {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[fig.layout.xaxis.title.text[-4:-1]]
    assert round(sum(sum(bar.x) for bar in fig.data) * unit) == run.step_peak_bytes
    assert sum(row["bytes"] for row in ledger_chart(at_peak).rows()) == run.step_peak_bytes


def test_rows_follow_the_module_not_the_alphabet() -> None:
    run = measured(Chain(n_blocks=12))
    expected = [f"layers.{i}" for i in range(12)]
    assert [y for y in ledger_chart(ledger(run)).figure.data[0].y if y in expected] == expected
    fig = ledger_chart(ledger(measured(Chain(n_blocks=500))), [f"layers.{i}" for i in range(500)]).figure
    assert len(fig.data[0].y) <= 26 and fig.layout.height < 1000, "many blocks stay readable"


def test_the_title_says_where_the_peak_is_and_clicks_find_their_blocks() -> None:
    at_peak = ledger_chart(ledger(measured(recompute=range(6))))
    title = at_peak.figure.layout.title
    assert (title.text, title.subtitle.text) == (
        "What is alive at the peak?", "90.0 MiB, 67 % into recompute of layers.0"
    )  # fmt: skip
    assert "90.0 MiB in all" in at_peak.alt
    for bar in ledger_chart(ledger(measured())).figure.data:
        for label, custom in zip(bar.y, bar.customdata):
            assert custom[0] == ("" if label == "(model itself)" else label)


def test_bars_add_up_to_what_the_model_saves() -> None:
    pair = compared(recompute=[0, 2])
    fig = saved_bytes_chart(pair).figure
    for bar, run in zip(fig.data, (pair.baseline, pair.candidate)):
        head = run.by_fqn["head"].saved_after_forward_bytes
        assert sum(bar.x) * 1024**2 == run.by_fqn[""].saved_after_forward_bytes + head
    baseline, candidate = fig.data
    assert set(baseline.marker.pattern.shape) == {""}
    assert candidate.marker.pattern.shape[:4] == ("/", "", "/", ""), "hatched where recomputed"


def test_table_twin_has_every_block() -> None:
    pair = compared(recompute=[1])
    table = {row["block"]: row for row in saved_bytes_chart(pair).rows()}
    assert len(table) == len(pair.baseline.blocks)
    assert table["layers.1"]["ran again"] == 1 and table["layers.0"]["ran again"] == 0
    assert table["layers.1"]["skipped by early stop (FLOP)"] == 250_000_000
    for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate)):
        saved = {row["block"]: row[f"saved, {name} (bytes)"] for row in saved_bytes_chart(pair).rows()}
        assert saved["layers.1"] == run.by_fqn["layers.1"].saved_after_forward_bytes
