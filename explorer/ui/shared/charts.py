"""How every chart stands on the page: itself, its description for a screen reader, and the same numbers as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from explorer.view.drawing.figure import CONFIG, readable


def chart(figure: Any, *, key: str, alt: str, height: int | None = None) -> None:
    """A Plotly figure; its picture downloads from the tool bar that shows on hover."""
    if height is not None:
        figure.update_layout(height=height)
    readable(figure, dark=st.context.theme.type == "dark")
    st.plotly_chart(figure, key=key, width="stretch", config=_config(key), alt=alt)


def clickable_chart(figure: Any, act: Callable[[list[Any]], None], *, key: str, alt: str) -> None:
    """As `chart`, and a click calls `act` with the point's customdata, once: later reruns do not repeat it."""

    def clicked() -> None:
        points = st.session_state[key]["selection"]["points"]
        if points:
            act(_custom(points[0]))

    readable(figure, dark=st.context.theme.type == "dark")
    st.plotly_chart(
        figure, key=key, width="stretch", config=_config(key), alt=alt, on_select=clicked, selection_mode="points"
    )


def _custom(point: Mapping[str, Any]) -> Any:
    custom = point.get("customdata")
    return list(custom.values()) if isinstance(custom, dict) else custom


Rows = Sequence[dict[str, Any]]


def twin(rows: Callable[[], Rows], *, key: str, what: str) -> None:
    """The chart's numbers as a table and as a CSV file; `rows` are asked for when it is unfolded."""
    st.fragment(_twin)(rows, key, what)


def _twin(rows: Callable[[], Rows], key: str, what: str) -> None:
    fold = st.expander("As a table", icon=":material/table_chart:", key=f"{key}_twin", on_change="rerun")
    if not fold.open:
        return
    with fold:
        st.dataframe(list(rows()), key=f"{key}_table", width="stretch", hide_index=True, alt=f"Table of {what}")
        st.download_button(
            "CSV",
            data=lambda: as_csv(rows()),
            file_name=f"{key}.csv",
            mime="text/csv",
            key=f"{key}_csv",
            icon=":material/download:",
            on_click="ignore",
        )


def as_csv(rows: Rows) -> str:
    """Rows as CSV; a cell that a spreadsheet would take for a formula is quoted as text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _config(key: str) -> dict[str, Any]:
    return {**CONFIG, "toImageButtonOptions": {"format": "svg", "filename": key}}
