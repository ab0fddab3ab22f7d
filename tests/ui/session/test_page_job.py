"""The life of a page's job: one at a time, found again after a refresh, and its end is always said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import streamlit as st

from explorer.jobs.protocol import Compare, Describe, FindPlans
from explorer.record import Failure, ModelRef, RunSpec
from explorer.ui.session import backend, page_job
from explorer.ui.session.page_job import PageJob
from explorer.ui.shared.run_bar import CANCELLING, in_words
from tests import graphs
from tests.ui.conftest import SAMPLES
from tests.ui.fake_worker import FakeJob, FakeWorker

SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"))
COMPARE = Compare(baseline=SPEC, candidate=SPEC)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    worker = FakeWorker(graphs.gpt(6), slow=True)
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "samples", lambda: SAMPLES)
    return worker


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The address bar: outside of a page there is none."""
    query: dict[str, Any] = {}
    monkeypatch.setattr(st, "query_params", query)
    yield query


def nothing(job: object) -> None:
    raise AssertionError("there is no result to take")


def test_it_starts_is_looked_at_and_settles_once(worker: FakeWorker, address: dict[str, Any]) -> None:
    life, taken = PageJob(), []
    page_job.start(life, COMPARE)
    assert (life.what, address["job"]) == ("Compare", life.id)
    job = page_job.under_way(life, nothing)
    assert isinstance(job, FakeJob)
    worker.answer(job)
    assert page_job.settle(life, taken.append) and taken == [job]
    assert life == PageJob() and "job" not in address
    assert not page_job.settle(life, nothing)


def test_equal_requests_of_two_windows_are_one_job_until_it_is_cancelled(worker: FakeWorker) -> None:
    windows = [PageJob() for _ in range(3)]
    for window in windows[:2]:
        page_job.start(window, COMPARE)
    page_job.start(windows[0], COMPARE)
    assert windows[0].id == windows[1].id and len(worker.jobs) == 1, "a second press starts nothing"
    worker.jobs[str(windows[0].id)].cancelled = True
    page_job.start(windows[2], COMPARE)
    assert windows[2].id != windows[0].id


def test_a_failure_stays_until_the_next_start(worker: FakeWorker, address: dict[str, Any]) -> None:
    life = PageJob()
    page_job.start(life, COMPARE)
    failure = Failure(kind="crash", sentence="Gone.")
    worker.jobs[str(life.id)].finish(failure=failure)
    assert page_job.settle(life, nothing) and life.failure == failure
    page_job.start(life, COMPARE)
    assert life.failure is None and life.id is not None
    worker.jobs.clear()
    assert page_job.under_way(life, nothing) is None, "a job that the worker does not know any more"
    assert life.failure == page_job.LOST and life.id is None and "job" not in address


@pytest.mark.parametrize("model", [ModelRef(target="/etc/passwd.py"), ModelRef(target=SPEC.model.target, size="huge")])
def test_a_model_that_is_not_offered_reaches_no_worker(worker: FakeWorker, model: ModelRef) -> None:
    life = PageJob()
    page_job.start(life, Describe(model=model, seed=0))
    assert not worker.jobs and life.id is None
    assert life.failure is not None and life.failure.kind == "bad input"
    page_job.start(life, FindPlans(run=graphs.measured(graphs.gpt(1), SPEC), graph=graphs.gpt(1)))
    assert life.what == "FindPlans" and life.failure is None, "a request without a model needs none on the list"


def test_a_refresh_finds_its_job_and_takes_no_other_pages(worker: FakeWorker, address: dict[str, Any]) -> None:
    page_job.start(PageJob(), COMPARE)
    (job,) = worker.jobs.values()
    refreshed, other = PageJob(), PageJob()
    page_job.attach(refreshed, "explore")
    assert (refreshed.id, refreshed.what) == (job.id, "Compare")
    page_job.attach(other, "lab")
    assert other.id is None and "job" not in address
    page_job.attach(refreshed, "explore")
    assert address["job"] == job.id, "whoever comes back to the page finds it named again"


def test_cancel_is_heard_at_once_and_ends_as_a_failure(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJob, "cancel", lambda job: setattr(job, "cancelled", True))
    life = PageJob()
    page_job.start(life, COMPARE)
    job: Any = page_job.running(life)
    assert in_words(life, job).startswith("Running baseline and candidate: step")
    page_job.cancel(life)
    assert job.cancelled and in_words(life, job) == CANCELLING
    job.finish(failure=Failure(kind="cancelled", sentence="The run was cancelled."))
    page_job.settle(life, nothing)
    assert not life.cancelling and life.failure is not None and life.failure.kind == "cancelled"
