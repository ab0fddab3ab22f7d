"""The lab page with a worker that knows the answer: first visit, switches, stale results, failure, address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.lab import plan as lessons_file
from explorer.lab.jobs import RunLab
from explorer.lab.plan import lessons
from explorer.lab.record import LabOutcome
from explorer.lab.ui import page as lab
from explorer.lab.view.outcome import recorded_pictures
from explorer.record.failure import Failure
from explorer.ui.session import backend
from tests import graphs
from tests.lab.added import with_one_more
from tests.lab.view.test_outcome import outcome as one_outcome
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import App, at_address, settle, texts

SCRIPT = "from explorer.lab.ui import page as lab\nlab.page()\n"


class LabWorker(FakeWorker):
    """Finishes an experiment at once unless told to wait."""

    def __init__(self) -> None:
        super().__init__(graphs.gpt(2))
        self.failure: Failure | None = None
        self.waits = False

    def answer(self, job: FakeJob) -> None:
        if not self.waits:
            job.finish(None if self.failure else outcome(job.request), self.failure)

    @property
    def asked(self) -> list[RunLab]:
        return [job.request for job in self.jobs.values()]


def outcome(request: RunLab) -> LabOutcome:
    findings = (f"Found with {sorted(request.switches.items())}.", "<img src=x onerror=alert(1)> **bold**")
    return replace(one_outcome(), experiment=request.name, switches=request.switches, findings=findings)


@pytest.fixture
def worker() -> LabWorker:
    return LabWorker()


@pytest.fixture
def open_lab(worker: LabWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "worker", lambda: worker)

    def start(**query: str) -> AppTest:
        query = query or {"experiment": lessons()[0].name}
        at = at_address(AppTest.from_string(SCRIPT, default_timeout=60), query).run()
        return at if worker.waits else settle(at, "lab")

    yield start
    st.cache_resource.clear()


def test_the_first_visit_runs_by_itself_and_every_other_experiment_waits_for_its_button(
    open_lab: App, worker: LabWorker
) -> None:
    at, (first, *others) = open_lab(), lessons()
    assert [request.name for request in worker.asked] == [first.name]
    assert "What to take away" in texts(at) and "Found with" in texts(at)
    assert any("\\<img src=x" in line.value and "\\*\\*bold\\*\\*" in line.value for line in at.markdown), "no markup"
    for n, lesson in enumerate(others, 1):
        at.selectbox(key="lab_experiment").select(lesson.name).run()
        assert len(worker.asked) == n and "has not run yet" in texts(at)
        at = settle(at.button(key="lab_run").click().run(), "lab")
        assert worker.asked[-1].name == lesson.name and "Found with" in texts(at)
    assert RunLab(name="early-stop", switches={"last": "linear", "early_stop": "on"}) in worker.asked
    at, n = settle(at.selectbox(key="lab_experiment").select("dropout").run(), "lab"), len(worker.asked)
    at.radio(key="lab_dropout_p").set_value("0.5").run()
    assert len(worker.asked) == n and "for other switches" in texts(at), "a flipped switch runs nothing"
    settle(at.button(key="lab_run").click().run(), "lab")
    assert worker.asked[-1].switches["p"] == "0.5" and "for other switches" not in texts(at)
    at.radio(key="lab_dropout_p").set_value("0.3").run()
    assert len(worker.asked) == n + 1 and "for other switches" not in texts(at), "what ran before is at hand"
    # A press on a card ends the gallery's rerun: Streamlit then keeps the value of the box of experiments.
    lab._open(at.session_state["lab"], others[0].name)
    assert others[0].title in texts(settle(at.run(), "lab"))


def test_the_gallery_has_a_picture_of_each_experiment_and_opens_and_runs_it(open_lab: App, worker: LabWorker) -> None:
    at = open_lab(device="cpu")
    assert worker.asked == [] and len(at.get("image")) == len(lessons())
    at = settle(at.button(key="lab_open_early-stop").click().run(), "lab")
    assert [request.name for request in worker.asked] == ["early-stop"] and "Found with" in texts(at)
    at.button(key="lab_gallery").click().run()
    assert "lab_open_dropout" in [button.key for button in at.button]


def test_the_address_restores_experiment_and_switches(open_lab: App, worker: LabWorker) -> None:
    at = open_lab(experiment="stepping", optimizer="sgd")
    assert worker.asked == [RunLab(name="stepping", switches={"optimizer": "sgd", "segments": "4"})]
    assert at.query_params["experiment"] == "stepping" and at.query_params["optimizer"] == "sgd"


def test_a_wrong_address_is_one_sentence(open_lab: App, worker: LabWorker) -> None:
    at = open_lab(experiment="dropuot")
    assert "no experiment 'dropuot'" in texts(at) and worker.asked == []


def test_a_failure_is_shown_and_the_page_goes_on(open_lab: App, worker: LabWorker) -> None:
    worker.failure = Failure(kind="crash", sentence="The worker process ended.")
    at = open_lab()
    assert "The worker process ended." in texts(at)
    worker.failure = None
    settle(at.button(key="lab_run").click().run(), "lab")
    assert "Found with" in texts(at) and "The worker process ended." not in texts(at)


def test_a_run_under_way_shows_progress_and_can_be_cancelled(open_lab: App, worker: LabWorker) -> None:
    worker.waits = True
    at = open_lab()
    assert at.button(key="lab_run").disabled and "running" in texts(at)
    at.button(key="lab_cancel").click().run()
    assert next(iter(worker.jobs.values())).cancelled


def test_a_lesson_added_as_a_file_is_offered(open_lab: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons_file, "LESSONS", with_one_more(tmp_path))
    at = open_lab(experiment="one-more")
    assert "Traps: One more lesson" in at.selectbox(key="lab_experiment").options
    assert "Can a lesson be added as a file?" in texts(at) and "Which switch?" in [radio.label for radio in at.radio]


def test_a_card_asks_draws_and_answers_as_a_recorded_run(open_lab: App) -> None:
    shown = texts(open_lab(device="cpu"))
    pictures = recorded_pictures()
    assert list(pictures) == [lesson.name for lesson in lessons()], "`python -m tests.golden.make lessons` records them"
    for lesson in lessons():
        assert lesson.question in shown and pictures[lesson.name].answer in shown
