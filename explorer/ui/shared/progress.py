"""Progress of a job: its current work, its share done, its elapsed time, and Cancel.

    Run ──▶ the bar alone is drawn again: it starts the job and shows it ──▶ five looks a second ──▶ the whole page

Charts are drawn once, when their data is new.
"""

from __future__ import annotations

import streamlit as st

from explorer.jobs.client import Job
from explorer.ui.session import page_job
from explorer.ui.session.page_job import PageJob, Take
from explorer.ui.session.plain import plain

LOOK_EVERY_S = 0.2
DOING = {
    "Describe": "Reading the model",
    "Measure": "Measuring the baseline",
    "Compare": "Running baseline and candidate",
    "DrawAutograd": "Drawing the autograd graph",
    "ProfileStages": "Measuring what each block costs",
    "FindJointPlan": "Planning below the cap",
    "RunPipeline": "Running the pipelined step and the unsplit ones",
    "RunLab": "Running",
}
"""Words for a job, by the request's name."""
FORESEEING = "Playing it without data"
CANCELLING = "Cancelling: it stops within seconds, at its next step or by force"


def watch(life: PageJob, take: Take, *, key: str) -> None:
    """Shows the job until its end; then `take` gets the result, and the whole page is drawn again."""
    st.fragment(_show, run_every=LOOK_EVERY_S)(life, take, key)


def _show(life: PageJob, take: Take, key: str) -> None:
    job = page_job.under_way(life, take)
    if job is None:
        st.rerun()
    share = job.progress.done / job.progress.total if job.progress.total else 0.0
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key=f"{key}_row"):
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


def in_words(life: PageJob, job: Job) -> str:
    """`Measuring the baseline: step (2 of 5)`; after Cancel, an acknowledgement."""
    if life.cancelling:
        return CANCELLING
    progress = job.progress
    how_far = f" ({progress.done} of {progress.total})" if progress.total else ""
    doing = FORESEEING if getattr(job.request, "without_data", False) else DOING[life.what]
    return f"{doing}: {plain(progress.what)}{how_far}"
