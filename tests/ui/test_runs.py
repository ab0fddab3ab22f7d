"""The list of runs: open, rename, pin, delete, carry elsewhere; a file that is no run is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare
from explorer.jobs.store import Store
from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui import backend
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, settle, texts

ALL = tuple(f"blocks.{i}" for i in range(6))
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"), policy=Policy.recompute(ALL))
SCRIPT = """
import streamlit as st
from explorer.ui.pages import runs
from explorer.ui import state
st.switch_page = lambda page: st.session_state.update(switched=True)
st.session_state.setdefault("pages", {"explore": None})
runs.page()
"""


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def runs_page(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "store", Store)

    def start(*selected: int) -> AppTest:
        at = AppTest.from_string(SCRIPT, default_timeout=60).run()
        assert not at.exception, at.exception[0].message
        if selected:
            at.session_state["runs"] = {"selection": {"rows": list(selected), "columns": [], "cells": []}}
            at.run()
            assert not at.exception, at.exception[0].message
        return at

    return start


def saved(store: Store, name: str = "mine") -> str:
    return store.save(graphs.compared(graphs.gpt(6), SPEC), name)


def test_an_empty_store_says_how_to_fill_it(runs_page: Callable[..., AppTest]) -> None:
    assert "No run yet" in texts(runs_page())


def test_every_run_is_listed_with_its_figures(runs_page: Callable[..., AppTest], store: Store) -> None:
    saved(store)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["name"] == "mine"
    assert row["step peak"] == "104.5 MiB → 34.5 MiB"
    assert row["gradients"] == "bitwise equal"


def test_a_file_that_is_no_run_is_one_sentence(runs_page: Callable[..., AppTest], store: Store) -> None:
    for data in (b"", b"garbage", saved_file(store)[:-7], saved_file(store).replace(b"\n", b"\r", 1)):
        at = runs_page()
        at.file_uploader(key="upload_run").upload("x.run", data)
        at.run()
        assert not at.exception
        assert len(at.error) == 1, data[:30]


def saved_file(store: Store) -> bytes:
    run_id = saved(store)
    data = store.export_file(run_id)
    store.delete(run_id)
    return data


def test_a_run_file_comes_back_in(runs_page: Callable[..., AppTest], store: Store) -> None:
    data = saved_file(store)
    at = runs_page()
    at.file_uploader(key="upload_run").upload("x.run", data)
    at.run()
    (run,) = store.list()
    assert store.load(run.run_id) == graphs.compared(graphs.gpt(6), SPEC)
    assert "was added" in at.success[0].value


def test_a_store_that_cannot_be_read_is_one_sentence(runs_page: Callable[..., AppTest], store: Store) -> None:
    Path(store.path).write_bytes(b"no database")
    at = runs_page()
    assert len(at.error) == 1


def test_opening_a_run_of_a_model_that_is_not_offered_runs_nothing(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    at = app()
    n_jobs = len(worker.jobs)
    foreign = msgspec.structs.replace(SPEC, model=ModelRef(target="/tmp/evil.py:build"))
    run_id = store.save(graphs.compared(graphs.gpt(6), foreign), "foreign")
    from explorer.ui import state as states

    state = states.fresh(foreign)
    state["shown"] = run_id
    at.session_state["explore"] = state
    at = settle(at.run())
    assert len(worker.jobs) == n_jobs
    assert "is not offered here" in texts(at)
    assert figures(at)["Step peak"] == "104.5 → 34.5 MiB"


def test_a_pinned_run_is_the_baseline_of_new_ones(app: Callable[..., AppTest], worker: FakeWorker) -> None:
    from explorer.record.base import to_plain

    at = app()
    at.session_state["pinned"] = to_plain(SPEC)
    at = settle(at.run())
    at = settle(at.button(key="run").click().run())
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == SPEC.policy
    assert job.request.candidate.policy == Policy()
