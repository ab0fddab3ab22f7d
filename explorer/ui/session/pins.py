"""Which policies this visitor's runs are compared with: for every model that of its pinned run, else keeping all."""

from __future__ import annotations

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.record.base import from_plain, to_plain
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec
from explorer.ui.session import backend

KEY = "pinned"


def read() -> None:
    """Reads the pins of the store: they outlive a visit."""
    st.session_state[KEY] = []
    try:
        records = [backend.record(run.run_id) for run in backend.store().list() if run.pinned]
    except ExplorerError:  # the Runs page says why the store cannot be read
        return
    runs = [record.candidate if isinstance(record, Comparison) else record for record in records]
    st.session_state[KEY] = [to_plain(run.spec) for run in runs if isinstance(run, Measurement)]


def baseline_of(candidate: RunSpec) -> RunSpec:
    """Baseline of `candidate`: the policy of its model's pinned run, or everything kept."""
    if KEY not in st.session_state:
        read()
    pinned = (from_plain(plain, RunSpec) for plain in st.session_state[KEY])
    policy = next((spec.policy for spec in pinned if spec.model == candidate.model), KEEP_ALL)
    return msgspec.structs.replace(candidate, policy=policy)
