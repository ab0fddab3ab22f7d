"""Charts on the page: the picture, its description for a screen reader, and its numbers as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, TypeVar

import streamlit as st

from explorer.record.policy import Policy
from explorer.ui.session.repository import runs
from explorer.ui.shared.download import Offer, download
from explorer.ui.shared.elements import fold, frame
from explorer.view.drawing.figure import CONFIG, Chart, Rows, figure, readable, size, written
from explorer.view.drawing.units import MIB

T = TypeVar("T")
PLAIN = (str, int, float, tuple, Policy, type(None))
"""Types whose values name a result of `made_once`; objects of other types are compared by identity."""
_in_use = RLock()
"""Held while a chart is finished and sent: visitors with windows of different heights share it."""


def import_plotly() -> None:
    """Imports the 25 modules of Plotly that the first figure needs. The import takes 80 ms."""
    figure("").add_scatter(line={}, fillpattern={})


def made_once(make: Callable[[], T], *of: object, dark: bool | None = None) -> T:
    """What `make` makes of `of`, or made in an earlier rerun of any visitor. Three quarters of a rerun make charts.

    `dark` names the theme where no page is drawn.
    """
    dark = st.context.theme.type == "dark" if dark is None else dark
    key = " ".join(repr(value) if isinstance(value, PLAIN) else str(id(value)) for value in (dark, *of))
    return runs().once("chart", key, lambda: (of, make()))[1]  # holds `of`: no other object gets its id


def draw(chart: Chart, *, key: str, act: Callable[[Any], None] | None = None) -> None:
    """Picture, words and table of `chart`; the table is folded in below it.

    A click calls `act` with the point's customdata, once: later reruns do not repeat it.
    """
    picture(chart, key=key, act=act)
    twin(chart, key=key)


def twin(chart: Chart, *, key: str) -> None:
    """The chart's numbers as a table and as a CSV file, folded in."""
    st.fragment(_twin)(chart, key)


def picture(chart: Chart, *, key: str, height: int | None = None, act: Callable[[Any], None] | None = None) -> None:
    """Draws a chart without its table, as the page already shows the numbers."""

    def clicked() -> None:
        chosen = st.session_state.get(key)  # None: another page has just replaced the chart
        points = chosen["selection"]["points"] if chosen else []
        if points and act is not None:
            act(_custom(points[0]))

    config = {**CONFIG, "toImageButtonOptions": {"format": "svg", "filename": key}}
    with _in_use:
        st.plotly_chart(
            finished(chart, height).figure,
            key=key,
            width="stretch",
            config=config,
            alt=chart.alt,
            on_select="ignore" if act is None else clicked,
            selection_mode="points",
        )


def finished(chart: Chart, height: int | None = None) -> Chart:
    """`chart` as it is drawn: in this height, readable on the visitor's theme. The chart itself is changed."""
    with _in_use:
        if height is not None and chart.figure.layout.height != height:
            size(chart.figure, height)
        if not chart.is_plotted:
            readable(chart.figure, dark=st.context.theme.type == "dark")
            chart.plotted()
    return chart


def _custom(point: Mapping[str, Any]) -> object:
    custom = point.get("customdata")
    fields = list(custom.values()) if isinstance(custom, dict) else custom
    if not fields:
        return fields
    return [written(entry) if isinstance(entry, str) else entry for entry in fields]


def _twin(chart: Chart, key: str) -> None:
    title = f"{chart.name[0].upper()}{chart.name[1:]} as a table"
    table = fold(title, icon=":material/table_chart:", key=f"{key}_twin")
    if not table.open:
        return
    with table:
        numbers(chart.rows(), key=f"{key}_table", alt=f"Table of {chart.name}")
        name = f"{chart.name.replace(' ', '-')}.csv"
        download(Offer("CSV", name, lambda: as_csv(chart.rows())), key=f"{key}_csv")


def numbers(rows: Rows, *, key: str, alt: str) -> None:
    """Draws `rows` of a chart as a table for a reader: bytes in MiB, operations with grouped digits.

    The CSV file of the same rows has the bytes themselves.
    """
    shown = [dict(map(_for_reader, row, row.values())) for row in rows]
    formats = {"(MiB)": "%.3f", "(FLOP)": "localized", "FLOPs": "localized"}
    columns = {
        name: st.column_config.NumberColumn(format=style)
        for name in dict.fromkeys(name for row in shown for name in row)
        for unit, style in formats.items()
        if name.endswith(unit)
    }
    frame(shown, key=key, alt=alt, columns=columns)


def _for_reader(name: str, value: object) -> tuple[str, object]:
    if not name.endswith("(bytes)"):
        return name, value
    return name.replace("(bytes)", "(MiB)"), value / MIB if isinstance(value, int | float) else value


def as_csv(rows: Rows) -> str:
    """Rows as CSV; a cell that a spreadsheet would take for a formula is quoted as text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _inert(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
