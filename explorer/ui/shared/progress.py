"""A job under way: what is happening, how far it is, how long it has taken, and Cancel.

    Run ──▶ the bar alone is drawn again: it starts the job and shows it ──▶ five looks a second ──▶ the whole page

Charts are drawn once, when there is something new in them.
"""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from explorer.jobs.client import Job
from explorer.ui.session.plain import plain

LOOK_EVERY_S = 0.2


def watch(look: Callable[[], Job | None], doing: str, *, key: str) -> None:
    """Shows the job that `look` gives, until it gives None: then the whole page is drawn again."""
    st.fragment(_show, run_every=LOOK_EVERY_S)(look, doing, key)


def _show(look: Callable[[], Job | None], doing: str, key: str) -> None:
    job = look()
    if job is None:
        st.rerun()
    progress = job.progress
    how_far = f" ({progress.done} of {progress.total})" if progress.total else ""
    share = progress.done / progress.total if progress.total else 0.0
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key=f"{key}_row"):
        with st.container(width="stretch"):
            st.progress(min(share, 1.0), text=f"{doing}: {plain(progress.what)}{how_far}, {job.elapsed_s:.0f} s")
        st.button("Cancel", icon=":material/cancel:", key=key, on_click=job.cancel)
