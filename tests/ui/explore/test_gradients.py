"""The Gradients tab: the matrix of other derivatives is taken when it is asked for, drawn, and taken away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import DeriveMatrix
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import say, settle, texts
from tests.view.report.kinds import matrix

App = Callable[..., AppTest]


@pytest.fixture
def deriving(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    def answer(job: FakeJob) -> None:
        if isinstance(job.request, DeriveMatrix):
            job.finish(matrix())
        else:
            FakeWorker.answer(worker, job)

    monkeypatch.setattr(worker, "answer", answer)
    return worker


def compared(app: App) -> AppTest:
    at = say(app(), on=["blocks.0"])
    at = settle(at.button(key="run").click().run())
    at.session_state["tabs"] = "Gradients"
    return settle(at.run())


def test_other_derivatives_are_taken_of_what_is_drawn_once_they_are_asked_for(app: App, deriving: FakeWorker) -> None:
    at = compared(app)
    n_charts, n_files = len(at.get("plotly_chart")), len(at.get("download_button"))
    assert not deriving.of(DeriveMatrix)
    at = settle(at.button(key="derive").click().run())
    (job,) = deriving.of(DeriveMatrix)
    assert job.request.spec == at.session_state["draft"].spec
    assert len(at.get("plotly_chart")) == n_charts + 1
    assert len(at.get("download_button")) > n_files
    assert any("Grid of outcomes" in chart.proto.alt for chart in at.get("plotly_chart"))


def test_while_something_runs_it_cannot_be_asked_for(app: App, deriving: FakeWorker) -> None:
    at = compared(app)
    deriving.slow = True
    at = at.button(key="run").click().run().run()
    assert at.session_state["explore"].job.what == "Compare" and at.button(key="derive").disabled


def test_before_a_comparison_the_tab_says_what_fills_it(app: App, deriving: FakeWorker) -> None:
    at = app()
    at.session_state["tabs"] = "Gradients"
    at = settle(at.run())
    assert "Nothing has been compared yet" in texts(at)
    assert "derive" not in [button.key for button in at.button]
