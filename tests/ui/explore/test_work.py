"""What the worker does for the page, unasked or asked, once for all visitors, and found again after a refresh."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, Describe, FindPlans, Measure
from explorer.record import Policy
from explorer.ui.session import address as link
from tests.ui.explore.visits import ALL, App, press, spec, start_only
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle, texts


def test_the_first_visit_describes_and_measures_the_baseline_unasked(app: App, worker: FakeWorker) -> None:
    at = app()
    assert [type(job.request) for job in worker.jobs.values()] == [Describe, Measure, FindPlans]
    assert figures(at)["Step peak"] == "104.5 MiB"
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]] == ["embedding", "dropout", "blocks", "norm", "head"]


def test_a_second_visitor_finds_the_measured_baseline(app: App, worker: FakeWorker) -> None:
    app()
    other = app()
    assert len(worker.jobs) == 3
    assert figures(other)["Step peak"] == "104.5 MiB"


def test_run_measures_and_compares(app: App, worker: FakeWorker) -> None:
    at = press(say(app(), on=ALL), "run")
    assert figures(at)["Step peak"] == "104.5 → 34.5 MiB"
    assert figures(at)["Gradients"] == "bitwise equal"
    assert figures(at)["Recomputed"] == "6 of 6 blocks"
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == Policy()
    assert job.request.candidate.policy == Policy.recompute(ALL)
    assert graph_data(at)["labels"]["blocks"][0] == "15.0 → 0.5 MiB each"


def test_a_refresh_finds_its_run_again(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    query = link.to_query(spec(at)) | {"job": job.id}
    assert at.query_params["job"] in (job.id, [job.id])
    again = start_only(**query)
    assert again.button(key="run").disabled
    worker.answer(job)
    settle(again)
    assert figures(again)["Step peak"] == "104.5 → 34.5 MiB"
    assert "job" not in again.query_params


def test_a_worker_that_forgot_the_job_is_said(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    worker.jobs.clear()
    assert "The app was restarted" in texts(settle(at))


def test_a_refresh_during_a_run_still_shows_the_baseline(app: Callable[..., AppTest], worker: FakeWorker) -> None:
    worker.slow = True
    at = app()
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    again = start_only(model="sample_models/gpt.py", size="small", job=job.id)
    assert figures(again)["Step peak"] == "104.5 MiB"
