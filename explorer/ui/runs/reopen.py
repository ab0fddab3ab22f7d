"""A stored run back on the page that shows it: model, policy, options, plan and figures; nothing is measured again."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import streamlit as st

from explorer.jobs.store import StoredRun
from explorer.record.comparison import Comparison
from explorer.record.matrix import DerivativeMatrix
from explorer.record.measurement import Measurement
from explorer.record.pipeline_run import PipelineRun
from explorer.record.run import RunSpec
from explorer.ui.explore import state as states
from explorer.ui.pipeline import address as plan_link
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.session import address as link
from explorer.ui.session import backend, known

PAGES = {
    "measurement": "explore",
    "comparison": "explore",
    "derivative matrix": "explore",
    "pipeline run": "pipeline",
}
"""Which page shows which kind of run."""


def reopen(run: StoredRun) -> Mapping[str, str]:
    """Puts the run into this visitor's state; returns the address it has there. Raises as `Store.load` does."""
    record = backend.record(run.run_id)
    known.note(run.run_id, record)
    if isinstance(record, Comparison):
        return _explore(record.candidate.spec, run.run_id, "shown")
    if isinstance(record, Measurement):
        return _explore(record.spec, run.run_id, "baseline")
    if isinstance(record, DerivativeMatrix):
        return _explore(record.spec, run.run_id, "matrix")
    assert isinstance(record, PipelineRun)
    return _pipeline(record, run.run_id)


def _explore(spec: RunSpec, run_id: str, place: str) -> Mapping[str, str]:
    state = states.fresh(spec)
    state["job"] = st.session_state.get("explore", state)["job"]
    state[place] = run_id
    if place == "matrix":
        st.session_state["tabs"] = "Gradients"
    st.session_state["explore"] = state
    return link.to_query(spec)


def _pipeline(record: PipelineRun, run_id: str) -> Mapping[str, str]:
    plan = record.spec.plan
    unsplit = msgspec.structs.replace(record.spec, plan=None)
    st.session_state["explore"] = states.fresh(unsplit)
    query = link.to_query(unsplit)
    if plan is not None:
        query |= plan_link.to_query({name: getattr(plan, name) for name in plan_link.USUAL}, plan.stages)
    st.session_state.pop("pipeline", None)
    st.query_params.from_dict(query)
    split = pipeline_state.current()
    split["shown"], split["engine"] = run_id, record.engine
    return query
