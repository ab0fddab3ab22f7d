"""The Runs page by itself, a run that is stored there, and rows of its list."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.record import ModelRef, Policy, RunSpec
from tests import graphs

ALL = tuple(f"blocks.{i}" for i in range(6))
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"), policy=Policy.recompute(ALL))
SCRIPT = """
import streamlit as st
from explorer.ui.runs import page as runs
st.switch_page = lambda page: st.session_state.update(switched=page)
st.session_state.setdefault("pages", {"explore": "explore", "pipeline": "pipeline"})
runs.page()
"""

TAKEN = """
from explorer.ui.pipeline import state
state.current()
"""


def select(at: AppTest, *rows: int) -> AppTest:
    """Ticks these rows of the list."""
    if rows:
        table = f"runs_{at.session_state['runs'].order}"
        at.session_state[table] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
        at.run()
        assert not at.exception, at.exception[0].message
    return at


def saved(store: Store, name: str = "mine") -> str:
    return store.save(graphs.compared(graphs.gpt(6), SPEC), name)
