"""Panels for runs without a result: the request, the cause, the next step, and the traceback one click away."""

from __future__ import annotations

import streamlit as st

from explorer.record.failure import Failure
from explorer.ui.session.page_job import PageJob
from explorer.view.drawing.units import mib

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
    if life.failure is not None and failure_panel(life.failure, key=key, title=REFUSED if life.refused else ""):
        life.failure = None
        st.rerun()


def failure_panel(failure: Failure, *, key: str, title: str = "") -> bool:
    """Draws the failure under `title`, or under that of its kind. Returns whether a person closed it."""
    calm = failure.kind == "cancelled"
    with st.container(border=True, gap="xsmall", key=f"failure_{key}"):
        words, close = st.columns([8, 1], vertical_alignment="top")
        with words:
            colour, icon = ("gray", "block") if calm else ("red", "error")
            st.markdown(f":{colour}[:material/{icon}: **{title or TITLES[failure.kind]}**]")
            # st.text: sentences carry names from models, which must not become markup.
            st.text(failure.sentence)
            if failure.asked_bytes is not None:
                st.text(f"Asked for {mib(failure.asked_bytes)}, free were {mib(failure.free_bytes)}.")
            if failure.hint:
                st.text(failure.hint)
        with close:
            closed = st.button("Close", icon=":material/close:", key=f"close_{key}", type="tertiary")
        if failure.traceback and not calm:
            with st.expander("Traceback", key=f"traceback_{key}"):
                st.code(failure.traceback, language="python")
    return closed
