"""A stored run on its way from the list of runs to the page that shows it; nothing is measured again.

The list names the run. The page takes the run when drawn next, as only the page knows its state.
"""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.store import StoredRun
from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.record.pipeline_run import PipelineRun
from explorer.ui.session import backend, known

PAGES = {
    "measurement": "explore",
    "comparison": "explore",
    "pipeline run": "pipeline",
}
"""Which page shows which kind of run."""
KEY = "opened_run"


class Opened(NamedTuple):
    """A run that its page shall show."""

    run_id: str
    record: Measurement | Comparison | PipelineRun


def hand_over(run: StoredRun) -> str:
    """Remembers `run` for its page; returns that page's name. Raises as `Store.load` does."""
    record = backend.record(run.run_id)
    known.note(run.run_id, record)
    if isinstance(record, Measurement) and record.spec.model.is_recorded:
        backend.known().keep(f"recorded {record.spec.model.target}", run.run_id)
    st.session_state[KEY] = [PAGES[run.kind], run.run_id]
    return PAGES[run.kind]


def _draw_from_file(record: Record) -> None:
    """Keeps the run's graph as the drawing of a model that is not on offer here. A model on offer is described instead,
    as its code may differ from the file."""
    graph, spec = run_file.graph_of(record), run_file.spec_of(record)
    if graph is None or spec is None:
        return
    try:
        backend.check_offered(spec.model)
    except ExplorerError:
        played = getattr(getattr(record, "candidate", record), "origin", "") == "predicted"
        backend.records().keep(backend.graph_key(spec.model, spec.device, without_data=played), graph)


def taken(page: str) -> Opened | None:
    """The run handed to `page`; a second call returns None."""
    wanted = st.session_state.get(KEY)
    if wanted is None or wanted[0] != page:
        return None
    del st.session_state[KEY]
    record = backend.record(wanted[1])
    _draw_from_file(record)
    return Opened(wanted[1], record)
