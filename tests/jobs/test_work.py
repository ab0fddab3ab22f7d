"""A job in its own process: one answer whatever happens, its result in the store before anybody is told of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from explorer.errors import ModelFailed
from explorer.jobs import work as work_module
from explorer.jobs.protocol import Event, Failed, Finished, Measure, Reported, Request, Submit, read_frame
from explorer.jobs.store import Store
from explorer.jobs.work import work
from explorer.record.base import Record, to_msgpack
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.plan import Progress, Report
from explorer.record.run import RunSpec
from tests.jobs.runs import measured


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stays what it is."""
    monkeypatch.setattr(work_module, "be_first_to_go", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", None)


def answered(answer: object, store: Path | None, *, cancelled: bool = False, **submit: object) -> list[Event]:
    ear, voice = os.pipe()
    cancels, cancel = os.pipe()
    if cancelled:
        os.write(cancel, b"x")
    spec = RunSpec(model=ModelRef(target="a.py"), time_limit_s=submit.pop("limit_s", 60.0))
    submitted = Submit(job="7", request=Measure(spec=spec), **submit)
    work(answer, None if store is None else str(store), submitted, "/tmp", (voice, cancels))
    events = []
    with os.fdopen(ear, "rb") as stream:
        while not events or isinstance(events[-1], Reported):
            events.append(read_frame(stream, Event))
    os.close(cancel)
    assert {event.job for event in events} == {"7"}
    return events


def measures(request: Request, report: Report) -> Record:
    report(Progress(what="stepping", done=1, total=2))
    return measured()


def test_reports_come_first_and_the_result_is_in_the_store(tmp_path: Path) -> None:
    *reports, last = answered(measures, tmp_path / "runs.sqlite")
    assert [event.progress.what for event in reports] == ["starting", "stepping"]
    assert isinstance(last, Finished) and last.result == to_msgpack(measured()) and last.run_id is not None
    assert Store(tmp_path / "runs.sqlite").load(last.run_id) == measured()


@pytest.mark.parametrize("how", ["not asked for", "no store", "a description"])
def test_what_is_not_kept_is_answered_all_the_same(how: str, tmp_path: Path) -> None:
    def describes(request: Request, report: Report) -> Record:
        return ModelGraph(model=ModelRef(target="a.py"), blocks=(), edges=())

    store = None if how == "no store" else tmp_path / "runs.sqlite"
    last = answered(describes if how == "a description" else measures, store, keep=how != "not asked for")[-1]
    assert isinstance(last, Finished) and last.run_id is None and last.warning == ""


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    last = answered(measures, tmp_path / "file" / "runs.sqlite")[-1]
    assert isinstance(last, Finished) and last.run_id is None and "could not be saved" in last.warning


def test_whatever_is_raised_is_an_answer() -> None:
    def raises(error: BaseException) -> object:
        def answer(request: Request, report: Report) -> Record:
            raise error

        return answer

    for error, kind in ((ModelFailed("no"), "model raised"), (SystemExit(3), "model raised")):
        last = answered(raises(error), None)[-1]
        assert isinstance(last, Failed) and last.failure.kind == kind


def test_a_cancel_is_heard_at_the_next_report() -> None:
    last = answered(measures, None, cancelled=True)[-1]
    assert isinstance(last, Failed) and last.failure.kind == "cancelled"


def test_a_run_beyond_its_limit_is_told_as_that() -> None:
    last = answered(measures, None, limit_s=0.0)[-1]
    assert isinstance(last, Failed) and last.failure.kind == "time-out" and "limit of 0 s" in last.failure.sentence
