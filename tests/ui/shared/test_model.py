"""The row of choices: weights are those that the app was started with, and a file that does not fit is a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from explorer.errors import BadInput
from explorer.jobs.protocol import Describe, Measure
from explorer.record import Failure, ModelRef
from explorer.ui.session import backend
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import address, graph_data, settle, texts, widget

App = Callable[..., AppTest]
FILE = str(Path("run/model.safetensors").resolve())
FAULT = f"The weights in {FILE} are not those of sample_models/gpt.py: it lacks head.weight."


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *words: monkeypatch.setattr(sys, "argv", ["app.py", *words])


def names_of(at: AppTest) -> list[str]:
    return [one.label for one in at.selectbox]


def model_of(at: AppTest) -> ModelRef:
    ref: ModelRef = at.session_state["draft"].spec.model
    return ref


def take(at: AppTest, file: str) -> AppTest:
    return settle(widget(at, "selectbox", "weights").set_value(file).run())


def test_without_the_flag_nothing_about_weights_stands_there(app: App) -> None:
    assert "weights" not in names_of(app())


def test_weights_are_offered_by_name_and_run_with_the_model(app: App, worker: FakeWorker, started_with: Any) -> None:
    started_with("--weights", "run/model.safetensors", "--weights=other.pt")
    at = app()
    field = widget(at, "selectbox", "weights")
    assert (field.options, field.value) == (["as built", "model.safetensors", "other.pt"], "")
    at = take(at, FILE)
    assert model_of(at).weights == FILE
    assert "changed options] weights model.safetensors" in texts(at).replace("\\", "")
    assert worker.of(Describe)[-1].request.model.weights == FILE
    assert worker.of(Measure)[-1].request.spec.model.weights == FILE
    again = app(**address(at))
    assert model_of(again).weights == FILE, "a link restores them"
    at = settle(widget(at, "selectbox", "size").set_value("gpu").run())
    assert model_of(at) == ModelRef(target="sample_models/gpt.py", size="gpu"), "another size has other weights"


def test_a_file_that_does_not_fit_is_one_sentence_and_can_be_taken_back(
    app: App, worker: FakeWorker, started_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(job: FakeJob) -> None:
        if isinstance(job.request, Describe) and job.request.model.weights:
            job.finish(failure=Failure(kind="bad input", sentence=FAULT, hint="Leave the weights out."))
        else:
            FakeWorker.answer(worker, job)

    monkeypatch.setattr(worker, "answer", answer)
    started_with("--weights", FILE)
    at = take(app(), FILE)
    assert [one.value for one in at.text if FILE in one.value] == [FAULT]
    assert "Leave the weights out." in texts(at)
    assert not [job for job in worker.of(Measure) if job.request.spec.model.weights], "nothing ran with them"
    at = take(at, "")
    assert FAULT not in texts(at) and graph_data(at)["geometry"]["rows"]


def test_no_link_and_no_file_names_other_weights(app: App, worker: FakeWorker, started_with: Any) -> None:
    at = app(model="sample_models/gpt.py", size="small", weights="/etc/passwd")
    assert model_of(at).weights == "" and "not offered here" in texts(at)
    assert all(not job.request.model.weights for job in worker.of(Describe))
    started_with("--weights", FILE)
    with pytest.raises(BadInput, match="-- --weights /etc/passwd"):
        backend.check_offered(ModelRef(target="sample_models/gpt.py", weights="/etc/passwd"))
    backend.check_offered(ModelRef(target="sample_models/gpt.py", weights=FILE))
