"""Page tests: the whole app in one process, with a worker that knows the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import streamlit as st
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.plan.catalogue import Sample
from explorer.ui.session import backend
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import select, settle, start_only

RUNS = """
import streamlit as st
from explorer.ui.runs import page as runs
st.session_state.setdefault("pages", {"explore": "explore", "pipeline": "pipeline"})
runs.page()
"""
SAMPLES = (
    Sample(
        name="gpt",
        target="sample_models/gpt.py",
        title="A GPT",
        lesson="Dropout and attention.",
        sizes={"small": {"n_layers": 6, "dropout": 0.1}, "gpu": {"n_layers": 12, "dropout": 0.1}},
    ),
    Sample(
        name="unet", target="sample_models/unet.py", title="A U-Net", lesson="Skips.", sizes={"small": {"width": 8}}
    ),
)


@pytest.fixture(scope="session", autouse=True)
def installed_once() -> Iterator[None]:
    """Every new AppTest reads what a hundred installed packages say of themselves; it does not change meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(graphs.gpt(6), store=Store())


@pytest.fixture
def app(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AppTest]]:
    """Starts the app, at an address if one is given; a page that raised fails the test."""
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "samples", lambda: SAMPLES)

    def start(**query: str) -> AppTest:
        return settle(start_only(**query))

    yield start
    st.cache_resource.clear()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def runs_page(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "store", Store)
    monkeypatch.setattr(st, "switch_page", lambda page: st.session_state.update(switched=page))

    def start(*selected: int) -> AppTest:
        at = AppTest.from_string(RUNS, default_timeout=60).run()
        assert not at.exception, at.exception[0].message
        return select(at, *selected)

    return start
