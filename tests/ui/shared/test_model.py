"""The row of choices: its controls show its records after any changes; weights are those of the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.errors import BadInput
from explorer.jobs.protocol import Measure
from explorer.record import Failure, ModelRef, Policy, RunSpec
from explorer.record.base import limits
from explorer.ui.session import address as link
from explorer.ui.session import backend
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.ui.shared.model import NUMBERS
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import App, address, graph_data, press, settle, spec, texts, upload, widget

SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"))
FILE = str(Path("run/model.safetensors").resolve())
FAULT = f"The weights in {FILE} are not those of sample_models/gpt.py: it lacks head.weight."


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *words: monkeypatch.setattr(sys, "argv", ["app.py", *words])


def names_of(at: AppTest) -> list[str]:
    return [one.label for one in at.selectbox]


def take(at: AppTest, file: str) -> AppTest:
    return settle(widget(at, "selectbox", "weights").set_value(file).run())


@pytest.mark.parametrize("end", [0, 1])
def test_a_link_at_the_limits_of_the_record_is_drawn_and_one_beyond_is_a_sentence(app: App, end: int) -> None:
    largest = {name: limits(RunSpec, name)[end] for name in (*NUMBERS, "momentum")}
    extreme = replace(SPEC, optimizer="sgd", **largest)
    at = app(**link.to_query(extreme))
    assert spec(at) == extreme and not at.session_state["draft"].message
    assert {name: widget(at, "number_input", f"option_{name}").value for name in largest} == largest
    for name in ("n_repeats", "n_threads"):
        at = app(**link.to_query(replace(SPEC, **{name: largest[name] + 2 * end - 1})))
        assert name in texts(at) and spec(at).n_threads == 1


def test_weights_are_offered_by_name_and_run_with_the_model(app: App, worker: FakeWorker, started_with: Any) -> None:
    started_with("--weights", "run/model.safetensors", "--weights=other.pt")
    at = app()
    field = widget(at, "selectbox", "weights")
    assert (field.options, field.value) == (["as built", "model.safetensors", "other.pt"], "")
    at = take(at, FILE)
    assert spec(at).model.weights == FILE
    assert "changed options] weights model.safetensors" in texts(at)
    assert worker.of(Measure)[-1].request.spec.model.weights == FILE
    again = app(**address(at))
    assert spec(again).model.weights == FILE, "a link restores them"
    at = settle(widget(at, "selectbox", "size").set_value("gpu").run())
    assert spec(at).model == ModelRef(target="sample_models/gpt.py", size="gpu"), "another size has other weights"


def test_a_wrong_file_is_one_sentence(
    app: App, worker: FakeWorker, started_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(job: FakeJob) -> None:
        if isinstance(job.request, Measure) and job.request.spec.model.weights:
            job.finish(failure=Failure(kind="bad input", sentence=FAULT, hint="Leave the weights out."))
        else:
            FakeWorker.answer(worker, job)

    monkeypatch.setattr(worker, "answer", answer)
    started_with("--weights", FILE)
    at = take(app(), FILE)
    assert [one.value for one in at.text if FILE in one.value] == [FAULT]
    assert "Leave the weights out." in texts(at)
    at = take(at, "")
    assert FAULT not in texts(at) and graph_data(at)["geometry"]["rows"]


def test_no_link_and_no_file_names_other_weights(app: App, worker: FakeWorker, started_with: Any) -> None:
    at = app(model="sample_models/gpt.py", size="small", weights="/etc/passwd")
    assert spec(at).model.weights == "" and "not offered here" in texts(at)
    assert all(not job.request.spec.model.weights for job in worker.of(Measure))
    started_with("--weights", FILE)
    with pytest.raises(BadInput, match="-- --weights /etc/passwd"):
        backend.check_offered(ModelRef(target="sample_models/gpt.py", weights="/etc/passwd"))
    backend.check_offered(ModelRef(target="sample_models/gpt.py", weights=FILE))


SWITCHES = ("preserve_rng_state", "early_stop", "use_reentrant")
ON = {True: b"true", False: b"false"}
HAPPENED = (
    ("switch", "preserve_rng_state"), ("import", True), ("undo", None), ("switch", "early_stop"), ("optimizer", "sgd"),
    ("repeats", 4), ("model", "unet"),
)  # fmt: skip


def do(at: AppTest, worker: FakeWorker, what: str, how: object) -> None:
    """One thing that a person does; what it must lead to is asserted where it is plain."""
    if what == "switch":
        now = widget(at, "toggle", f"option_{how}")
        wanted = not now.value
        now.set_value(wanted)
        settle(at.run())
        assert getattr(spec(at).policy, str(how)) is wanted
    elif what == "optimizer":
        settle(widget(at, "selectbox", "option_optimizer").set_value(how).run())
        assert spec(at).optimizer == how
    elif what == "repeats":
        settle(widget(at, "number_input", "option_n_repeats").set_value(how).run())
        assert spec(at).n_repeats == how
    elif what == "import":
        text = b"version: 1\npolicy:\n  units: []\n  early_stop: " + ON[bool(how)] + b"\n"
        upload(at, text)
        assert spec(at).policy.early_stop is how
    elif what == "model":
        worker.graph = graphs.gpt(6) if how == "gpt" else graphs.unet()
        settle(widget(at, "selectbox", "model").set_value(f"sample_models/{how}.py").run())
        assert spec(at).model.target == f"sample_models/{how}.py"
    elif what in [button.key for button in at.button]:
        press(at, what)


def test_explore_shows_what_will_run(app: App, worker: FakeWorker) -> None:
    """tests/ui/session/test_values.py has any changes in any order, on a smaller page."""
    worker.graph = graphs.gpt(6)
    at = app()
    assert "changed options" not in texts(at) and "weights" not in names_of(at)
    for what, how in HAPPENED:
        if what == "model":  # options follow to the next model, the policy does not
            assert "optimizer sgd, n_repeats 4" in texts(at) and "early_stop off" in texts(at)
        do(at, worker, what, how)
        now = spec(at)
        assert {name: widget(at, "toggle", f"option_{name}").value for name in SWITCHES} == {
            name: getattr(now.policy, name) for name in SWITCHES
        }
        assert widget(at, "selectbox", "option_optimizer").value == now.optimizer
        assert widget(at, "number_input", "option_n_repeats").value == now.n_repeats
        assert widget(at, "selectbox", "model").value == now.model.target
    assert "optimizer sgd" in texts(at) and "early" not in texts(at)


def test_undo_of_an_option_draws_the_controls_again() -> None:
    """They stand outside of the part of the page that a click on undo draws."""
    for redraws, policy in ((False, Policy.recompute(["head"])), (True, Policy(early_stop=False))):
        draft = Draft(spec=RunSpec(model=graphs.gpt(6).model))
        drafts._take_over(draft, policy)
        assert draft.redraw is redraws and draft.spec.policy == policy
