"""The Run button with the job under way beside it, the same on every page.

A press on Run redraws only this bar, and the rest of the page stays usable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from explorer.ui.session.page_job import PageJob, Take
from explorer.ui.shared.progress import watch
from explorer.ui.shared.readable import on_primary

RUN_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBar:
    """The parts of a run bar that differ between pages."""

    key: str
    """Prefix of the keys of the bar's widgets."""
    help: str
    label: str = "Run"
    ready: bool
    """Whether there is something that could run."""
    start: Callable[[], None]
    """Starts the run that a person requests."""
    take: Take
    """Puts a result onto the page."""
    idle: Callable[[], object]
    """Draws the text beside Run while no job is under way."""


def run_bar(life: PageJob, bar: RunBar) -> None:
    """Draws the bar, and starts the run after a press on Run."""
    st.fragment(_bar)(life, bar)


def _bar(life: PageJob, bar: RunBar) -> None:
    if life.asked:
        _start(life, bar)
    busy = life.id is not None
    off = busy or not bar.ready
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key=f"{bar.key}run_row"):
        st.button(
            on_primary(bar.label, disabled=off),
            type="primary",
            icon=":material/play_arrow:",
            key=f"{bar.key}run",
            width=RUN_WIDTH,
            disabled=off,
            help=bar.help,
            on_click=lambda: setattr(life, "asked", True),
        )
        with st.container(width="stretch"):
            if busy:
                watch(life, bar.take, key=f"{bar.key}cancel")
            else:
                bar.idle()


def _start(life: PageJob, bar: RunBar) -> None:
    """An old failure leaves the page, a new one comes onto it: that draws the whole page."""
    life.asked = False
    failed = life.failure is not None
    bar.start()
    if failed or life.failure is not None:
        st.rerun()
