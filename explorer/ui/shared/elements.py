"""Small elements of every page: escaped and small text, folds, hazards and failures.

Text is readable at 4.5:1 also where Streamlit would fade it: badges in captions, words on the primary colour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.elements.lib.mutable_expander_container import ExpanderContainer

from explorer.record.failure import Failure
from explorer.record.graph import Hazard
from explorer.ui.session import window
from explorer.ui.session.page_job import PageJob
from explorer.view.drawing.units import mib
from explorer.view.graph.geometry import Window

ON_PRIMARY = "#0B1B2B"
"""Dark words on the light primary colour of the dark theme; Streamlit writes white in both."""
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!~|<>$:&])")


def escape(text: str) -> str:
    """`text` of a model, a file or a link, escaped so that neither Markdown nor Streamlit reads markup in it."""
    return _MARKUP.sub(r"\\\1", text)


def small_text(text: str, *, help: str | None = None) -> None:
    """A line as small as a caption whose badges keep their colour: a caption fades all of it to 60 %."""
    st.markdown(f":small[{text}]", help=help)


def horizontal(key: str, *, align: Literal["center", "bottom"] = "center") -> DeltaGenerator:
    """A container whose elements stand beside each other."""
    return st.container(horizontal=True, gap="small", vertical_alignment=align, key=key)


def on_primary(label: str, *, disabled: bool = False) -> str:
    """The label of a primary button; a disabled button has no coloured ground."""
    if disabled or st.context.theme.type != "dark":
        return label
    return f':color[{label}]{{foreground="{ON_PRIMARY}"}}'


def fold(title: str, *, key: str, icon: str | None = None, expanded: bool = False) -> ExpanderContainer:
    """An expander that stays as a person left it: Streamlit forgets expanders hidden behind another tab or page.

    `expanded` is its state until a person opens or closes it.
    """
    folds: dict[str, bool] = st.session_state.setdefault("folds", {})

    def note() -> None:
        folds[key] = bool(st.session_state.get(key, folds.get(key, expanded)))  # no value: replaced by another page

    return st.expander(title, folds.get(key, expanded), key=key, icon=icon, on_change=note)


def frame(rows: object, *, key: str, alt: str, columns: Mapping[str, Any] | None = None) -> None:
    """Draws a table as wide as its place; `columns` is Streamlit's configuration by name of the column."""
    st.dataframe(rows, key=key, alt=alt, hide_index=True, width="stretch", column_config=columns)


RIGHT_HEIGHT = 520


def two_columns(key: str) -> tuple[DeltaGenerator, DeltaGenerator]:
    """Places for controls at the left and results at the right; in a narrow window the results stand below.

    The results scroll in a box of the window's height, with the key `key`.
    """
    if window.narrow():
        rows = st.container()  # columns are as deep: a fragment keeps its place, so that a click in it arrives
        left, right = rows.container(), rows.container()
    else:
        left, right = st.columns([6, 8], gap="medium")
    return left, right.container(height="content" if window.narrow() else results_height(), border=False, key=key)


def results_height(visitor: Window | None = None) -> int:
    """Pixels of height for the results in a window, by default in that of the visitor whose page is drawn."""
    return RIGHT_HEIGHT + (visitor or window.laid_out_for()).height - window.USUAL_HEIGHT


SEVERITIES: dict[str, Literal["red", "orange", "gray"]] = {"error": "red", "warning": "orange", "note": "gray"}


def hazards_panel(hazards: tuple[Hazard, ...]) -> None:
    """Draws hazards known before a run, one box per hazard with its remedy, or that there are none."""
    if not hazards:
        st.caption("No known hazard in this policy on this model.")
    for hazard in hazards:
        with st.container(border=True, gap="xsmall"):
            st.badge(hazard.severity, color=SEVERITIES[hazard.severity])
            st.text(f"{hazard.sentence}\nRemedy: {hazard.remedy}\nBlocks: {', '.join(hazard.blocks) or 'all'}")


REFUSED = "This cannot be used"
"""Title of a refused input."""
TITLES = {
    "bad input": "This cannot run",
    "model raised": "The model raised an error",
    "out of memory": "Out of memory",
    "crash": "The worker process ended",
    "time-out": "The time limit was reached",
    "cancelled": "Cancelled",
    "not on this device": "Not on this device",
    "internal": "An error of the explorer itself",
}


def last_failure(life: PageJob, *, key: str) -> None:
    """Draws the failure of the last job or input, until the next job starts or a person closes the panel."""
    if life.failure is not None:
        close = partial(setattr, life, "failure", None)
        failure_panel(life.failure, key=key, title=REFUSED if life.refused else "", close=close)


def failure_panel(failure: Failure, *, key: str, title: str = "", close: Callable[[], None] | None = None) -> None:
    """Draws request, cause, next step and traceback under `title`, or under the title of the failure's kind.

    A press on its button calls `close`; without `close` there is no button.
    """
    calm = failure.kind == "cancelled"
    with st.container(border=True, gap="xsmall", key=f"failure_{key}"):
        words, corner = st.columns([8, 1], vertical_alignment="top")
        with words:
            colour, icon = ("gray", "block") if calm else ("red", "error")
            st.markdown(f":{colour}[:material/{icon}: **{title or TITLES[failure.kind]}**]")
            # st.text: sentences carry names from models, which must not become markup.
            st.text(failure.sentence)
            if failure.asked_bytes is not None:
                st.text(f"Asked for {mib(failure.asked_bytes)}, free were {mib(failure.free_bytes)}.")
            if failure.hint:
                st.text(failure.hint)
        if close is not None:
            icon = ":material/close:"
            corner.button("Close", icon=icon, key=f"close_{key}", type="tertiary", on_click=close)
        if failure.traceback and not calm:
            with st.expander("Traceback", key=f"traceback_{key}"):
                st.code(failure.traceback, language="python")
