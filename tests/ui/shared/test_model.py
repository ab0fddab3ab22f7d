"""The row of choices: weights are those that the app was started with, and a file that does not fit is a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.errors import BadInput
from explorer.jobs.protocol import Describe, Measure
from explorer.jobs.store import Store
from explorer.record import Failure, ModelRef, RunSpec
from explorer.record.base import limits
from explorer.ui.session import address as link
from explorer.ui.session import backend, opened
from explorer.ui.shared.model import NUMBERS
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import address, graph_data, settle, texts, widget

App = Callable[..., AppTest]
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"))
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


@pytest.mark.parametrize("end", [0, 1])
def test_a_link_at_the_limits_of_the_record_is_drawn_and_one_beyond_is_a_sentence(app: App, end: int) -> None:
    largest = {name: limits(RunSpec, name)[end] for name in (*NUMBERS, "momentum")}
    spec = replace(SPEC, optimizer="sgd", **largest)
    at = app(**link.to_query(spec))
    assert at.session_state["draft"].spec == spec and not at.session_state["draft"].message
    assert {name: widget(at, "number_input", f"option_{name}").value for name in largest} == largest
    for name in ("n_repeats", "n_threads"):
        at = app(**link.to_query(replace(SPEC, **{name: largest[name] + 2 * end - 1})))
        assert name in texts(at).replace("\\", "") and at.session_state["draft"].spec.n_threads == 1


def test_a_stored_run_of_sixty_repeats_and_ninety_nine_threads_opens(app: App, store: Store) -> None:
    spec = replace(SPEC, n_repeats=60, n_threads=99)
    at = app()
    at.session_state[opened.KEY] = ["explore", store.save(graphs.compared(graphs.gpt(6), spec))]
    settle(at.run())
    assert widget(at, "number_input", "option_n_repeats").value == 60


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
