"""The lab page with a worker that knows the answer: first visit, switches, stale results, failure, address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import RunLab
from explorer.plan import lessons as lessons_file
from explorer.plan.lessons import lessons
from explorer.record.failure import Failure
from explorer.record.lab import LabChart, LabOutcome, LabRow, LabSeries
from explorer.record.plan import Progress
from explorer.ui.session import backend
from tests.lab.added import with_one_more

SCRIPT = "from explorer.ui import lab\nlab.page()\n"


class LabJob:
    """Finished at once unless told to wait."""

    def __init__(self, id: str, request: RunLab, failure: Failure | None, *, waits: bool) -> None:
        self.id, self.request, self.failure = id, request, failure
        self.finished = not waits
        self.progress, self.elapsed_s, self.run_id = Progress(what="half way", done=1, total=2), 1.0, None
        self.result = None if failure else outcome(request)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class LabWorker:
    def __init__(self) -> None:
        self.jobs: dict[str, LabJob] = {}
        self.failure: Failure | None = None
        self.waits = False

    def submit(self, request: Any, *, keep: bool = True) -> LabJob:
        job = LabJob(f"job{len(self.jobs)}", request, self.failure, waits=self.waits)
        self.jobs[job.id] = job
        return job

    def open_jobs(self) -> tuple[LabJob, ...]:
        return tuple(job for job in self.jobs.values() if not job.finished)

    def job(self, id: str) -> LabJob | None:
        return self.jobs.get(id)

    @property
    def asked(self) -> list[RunLab]:
        return [job.request for job in self.jobs.values()]


def outcome(request: RunLab) -> LabOutcome:
    chart = LabChart(
        kind="bars", title="What?", x_title="x", y_title="y", x=("a",), series=(LabSeries(name="s", y=(1.0,)),)
    )
    finding = f"Found with {sorted(request.switches.items())}."
    rows = (LabRow(label="kept", outcome="baseline"),)
    return LabOutcome(
        experiment=request.name,
        switches=request.switches,
        device=request.device,
        rows=rows,
        chart=chart,
        findings=(finding, "<img src=x onerror=alert(1)> **bold**"),
        seconds=0.1,
    )


@pytest.fixture
def worker() -> LabWorker:
    return LabWorker()


@pytest.fixture
def open_lab(worker: LabWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AppTest]]:
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "worker", lambda: worker)

    def start(**query: str) -> AppTest:
        at = AppTest.from_string(SCRIPT, default_timeout=60)
        for name, value in query.items():
            at.query_params[name] = value
        return settled(at.run())

    yield start
    st.cache_resource.clear()


def settled(at: AppTest) -> AppTest:
    assert not at.exception, at.exception[0].message
    return at if at.session_state["lab"].job.id is None else at.run()


def text(at: AppTest) -> str:
    return "\n".join(str(part.value) for part in (*at.markdown, *at.caption, *at.text))


def test_first_visit_runs_the_first_experiment_by_itself(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    at = open_lab()
    assert [request.name for request in worker.asked] == [lessons()[0].name]
    assert "What to take away" in text(at) and "Found with" in text(at)
    assert "\\<img src=x" in text(at) and "\\*\\*bold\\*\\*" in text(at), "no finding becomes markup"


def test_another_experiment_waits_for_its_button(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    at = open_lab()
    at.selectbox(key="lab_experiment").select("early-stop").run()
    assert len(worker.asked) == 1 and "has not run yet" in text(at)
    settled(at.button(key="lab_run").click().run())
    assert worker.asked[-1] == RunLab(name="early-stop", switches={"last": "linear", "early_stop": "on"})
    assert "Found with" in text(at)


def test_a_flipped_switch_marks_the_result_as_older_and_runs_nothing(
    open_lab: Callable[..., AppTest], worker: LabWorker
) -> None:
    at = open_lab(experiment="dropout")
    at.radio(key="lab_dropout_p").set_value("0.5").run()
    assert len(worker.asked) == 1 and "for other switches" in text(at)
    settled(at.button(key="lab_run").click().run())
    assert worker.asked[-1].switches["p"] == "0.5" and "for other switches" not in text(at)
    at.radio(key="lab_dropout_p").set_value("0.3").run()
    assert len(worker.asked) == 2 and "for other switches" not in text(at), "what ran before is at hand"


def test_the_address_restores_experiment_and_switches(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    at = open_lab(experiment="stepping", optimizer="sgd")
    assert worker.asked == [RunLab(name="stepping", switches={"optimizer": "sgd", "segments": "4"})]
    assert at.query_params["experiment"] == "stepping" and at.query_params["optimizer"] == "sgd"


def test_a_wrong_address_is_one_sentence(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    at = open_lab(experiment="dropuot")
    assert "no experiment 'dropuot'" in text(at) and worker.asked == []


def test_a_failure_is_shown_and_the_page_goes_on(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    worker.failure = Failure(kind="crash", sentence="The worker process ended.")
    at = open_lab()
    assert "The worker process ended." in text(at)
    worker.failure = None
    settled(at.button(key="lab_run").click().run())
    assert "Found with" in text(at) and "The worker process ended." not in text(at)


def test_a_run_under_way_shows_progress_and_can_be_cancelled(
    open_lab: Callable[..., AppTest], worker: LabWorker
) -> None:
    worker.waits = True
    at = open_lab()
    assert at.button(key="lab_run").disabled and "running" in text(at)
    at.button(key="lab_cancel").click().run()
    assert next(iter(worker.jobs.values())).cancelled


def test_every_lesson_can_be_opened_and_run(open_lab: Callable[..., AppTest], worker: LabWorker) -> None:
    at = open_lab()
    for lesson in lessons()[1:]:
        at.selectbox(key="lab_experiment").select(lesson.name).run()
        at = settled(at.button(key="lab_run").click().run())
        assert worker.asked[-1].name == lesson.name and "Found with" in text(at)


def test_a_lesson_added_as_a_file_is_offered(
    open_lab: Callable[..., AppTest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons_file, "LAB", with_one_more(tmp_path))
    at = open_lab(experiment="one-more")
    assert "Traps: One more lesson" in at.selectbox(key="lab_experiment").options
    assert "Can a lesson be added as a file?" in text(at) and "Which switch?" in [radio.label for radio in at.radio]
