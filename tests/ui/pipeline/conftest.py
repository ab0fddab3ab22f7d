"""A visit to the Pipeline page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from explorer.ui.session import backend
from tests.ui.conftest import SAMPLES
from tests.ui.page_driver import WINDOW
from tests.ui.pipeline.pipeline_driver import SCRIPT, Open, PipelineWorker, settled


@pytest.fixture
def worker() -> PipelineWorker:
    return PipelineWorker()


@pytest.fixture
def visit(worker: PipelineWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "samples", lambda: SAMPLES)

    def start(*, waiting: bool = False, **query: str) -> AppTest:
        at = AppTest.from_string(SCRIPT, default_timeout=60)
        at.session_state["window"] = WINDOW
        for name, value in query.items():
            at.query_params[name] = value
        return at.run().run() if waiting else settled(at.run())

    yield start
    st.cache_resource.clear()
