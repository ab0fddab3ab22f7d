"""The Run button and the job under way beside it, the same on every page.

    Run ──▶ the bar alone is drawn again: it starts the job and shows it ──▶ news of the job ──▶ the whole page

A press on Run redraws only this bar, and the rest of the page stays usable. Charts are drawn once, when their data is
new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from explorer.jobs.client import Job
from explorer.jobs.protocol import ROWS
from explorer.ui.components import job_news
from explorer.ui.session import page_job
from explorer.ui.session.page_job import PageJob, Take
from explorer.ui.session.values import whole
from explorer.ui.shared.elements import escape, horizontal, on_primary

RUN_WIDTH = 140
LOOK_EVERY_S = 1.0
"""Between two looks at the progress; parts and the end of a job are looked at when they are there."""
PREDICTING = "Playing it without data"
CANCELLING = "Cancelling: it stops within seconds, at its next step or by force"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBar:
    """The parts of a run bar that differ between pages."""

    key: str
    """Prefix of the keys of the bar's widgets."""
    help: str
    label: str = "Run"
    ready: bool
    """Whether there is something that could run."""
    absorb: Callable[[], None] = lambda: None
    """Takes over clicks that came before the press, so that the run is the drawn one."""
    start: Callable[[], None]
    """Starts the run that a person requests."""
    take: Take
    """Puts a result onto the page."""
    take_part: Take = lambda job: None
    """Puts a part of the result onto the page while the job goes on."""
    idle: Callable[[], object]
    """Draws the text beside Run while no job is under way."""


def run_bar(life: PageJob, bar: RunBar) -> None:
    """Draws the bar, and starts the run after a press on Run."""
    st.fragment(_bar)(life, bar)


def _bar(life: PageJob, bar: RunBar) -> None:
    if life.requested:
        _start(life, bar)
    busy = life.id is not None
    off = busy or not bar.ready
    with horizontal(f"{bar.key}run_row"):
        st.button(
            on_primary(bar.label, disabled=off),
            type="primary",
            icon=":material/play_arrow:",
            key=f"{bar.key}run",
            width=RUN_WIDTH,
            disabled=off,
            help=bar.help,
            on_click=lambda: setattr(life, "requested", True),
        )
        with st.container(width="stretch"):
            if busy:
                st.fragment(_watch, run_every=LOOK_EVERY_S)(life, bar)
            else:
                bar.idle()


def _start(life: PageJob, bar: RunBar) -> None:
    """An old failure leaves the page, a new one comes onto it: that draws the whole page."""
    failed = life.failure is not None
    with whole():
        life.requested = False
        bar.absorb()
        bar.start()
    if failed or life.failure is not None:
        st.rerun()


def _watch(life: PageJob, bar: RunBar) -> None:
    """Shows the job until its end; then the bar takes the result, and the whole page is drawn again."""
    job = page_job.running(life)
    n_news = job.n_news if job is not None else 0  # before the look: no news falls between both
    job = page_job.under_way(life, bar.take)
    if job is None or page_job.take_part(life, bar.take_part):
        st.rerun()
    share = job.progress.done / job.progress.total if job.progress.total else 0.0
    key = f"{bar.key}cancel"
    with horizontal(f"{key}_row"):
        with st.container(width="stretch"):
            st.progress(min(share, 1.0), text=f"{in_words(life, job)}, {job.elapsed_s:.0f} s")
        st.button(
            "Cancel",
            icon=":material/cancel:",
            key=key,
            on_click=page_job.cancel,
            args=(life,),
            disabled=life.cancelling,
        )
    job_news(job.id, n_news, key=f"{bar.key}news")


def in_words(life: PageJob, job: Job) -> str:
    """`Measuring the baseline: step (2 of 5)`; after Cancel, an acknowledgement."""
    if life.cancelling:
        return CANCELLING
    progress = job.progress
    share = f" ({progress.done} of {progress.total})" if progress.total else ""
    doing = PREDICTING if getattr(job.request, "without_data", False) else ROWS[type(job.request)].doing
    return f"{doing}: {escape(progress.what)}{share}"
