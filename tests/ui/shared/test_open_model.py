"""Open a model of yours: what is typed is read, asked about or refused in place; a link opens nothing by itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from streamlit import config
from streamlit.testing.v1 import AppTest

from explorer.jobs import connection
from explorer.jobs.protocol import Describe, Measure, models_of
from explorer.record.failure import Failure
from explorer.record.graph import ModelRef
from explorer.ui import server
from explorer.ui.session import backend
from explorer.ui.session.address import SAME_USER
from explorer.ui.shared import open_model
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import App, settle, spec, texts, widget

NETS = """
from torch import nn
class Part(nn.Module): ...
class Net(nn.Module):
    def __init__(self, width, depth=2):
        self.part = Part()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "plain.py").write_text("from torch import nn\nclass Plain(nn.Module): ...\n")
    (tmp_path / "wrong.py").write_text("from torch import nn\nclass Net(nn.Module)\n")
    (tmp_path / "notes.py").write_text("x = 1\n")
    config.get_config_options()  # of the project's folder, for all later tests
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(app: App, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page with the real list of models, its panel open."""
    open_model._in_this_folder.clear()
    started = backend.samples()
    monkeypatch.setattr(backend, "samples", lambda: (*backend._opened_on_page(_targets(), ()), *started))
    at = app()
    at.session_state[f"{open_model.KEY}~0"] = True
    return at.run()


def _targets() -> tuple[str, ...]:
    return tuple(dict.fromkeys(model.target for model in backend.opened()))


def typed(at: AppTest, text: str) -> AppTest:
    box = widget(at, "selectbox", "open_text")
    box.options = [*box.options, text]
    box.set_value(text).run()
    assert not at.exception
    return at


def test_a_reference_opens_at_enter_and_stays_open_to_links(page: AppTest, worker: FakeWorker) -> None:
    assert {"nets.py:Net", "plain.py:Plain"} <= set(widget(page, "selectbox", "open_text").options)
    at = settle(typed(page, "plain.py"))
    assert spec(at).model == ModelRef(target="plain.py:Plain")
    asked = [model for job in worker.jobs.values() for model in models_of(job.request)]
    assert ModelRef(target="plain.py:Plain") in asked
    backend.check_offered(ModelRef(target="plain.py:Plain"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gone.py", "There is no file"),
        ("wrong.py", "line 2"),
        ("notes.py", "explorer run notes.py"),
        ("net", "names no model"),
        ("rm -rf:x", "names no model"),
        ("folder/", "names no model"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_place_before_anything_runs(
    page: AppTest, worker: FakeWorker, text: str, says: str
) -> None:
    before = len(worker.jobs)
    at = typed(page, text)
    assert says in " ".join(str(error.value).replace("\\", "") for error in at.error)
    assert len(worker.jobs) == before and not backend.opened()


def test_a_choice_and_an_argument_without_default_are_asked_for(page: AppTest) -> None:
    at = typed(page, "nets.py")
    widget(at, "button_group", "open_choice").set_value("nets.py:Net").run()
    assert not backend.opened(), "width has no default"
    at.button(key="FormSubmitter:open_form-Open").click().run()
    assert "needs width" in texts(at)
    next(field for field in at.text_input if field.label == "width").set_value("32")
    settle(at.button(key="FormSubmitter:open_form-Open").click().run())
    model = ModelRef(target="nets.py:Net", arguments={"width": 32})
    assert spec(at).model == model
    backend.check_offered(model)
    for stranger in ({"width": "/etc/passwd"}, {"width": 33}, {"depth": "x"}):
        with pytest.raises(backend.BadInput):
            backend.check_offered(ModelRef(target="nets.py:Net", arguments=stranger))


def test_a_failure_of_the_model_stands_beside_the_fields_that_may_mend_it(
    page: AppTest, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(kind="bad input", sentence="plain.py:Plain raised at line 7.")

    def answer(job: Any) -> None:
        job.finish(failure=failure)

    monkeypatch.setattr(worker, "answer", answer)
    at = settle(typed(page, "plain.py"))
    assert "at line 7" in " ".join(str(error.value).replace("\\", "") for error in at.error)
    assert {"batch", "length", "side"} <= {field.label for field in at.number_input}


def test_only_the_person_who_started_the_app_opens_models(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "may_open", lambda: False)
    at = page.run()
    assert not [box for box in at.selectbox if box.key and box.key.startswith("open_text")]
    draft = at.session_state["draft"]
    open_model._take_text(open_model.Opening(), draft, "plain.py")
    assert not backend.opened()


def test_a_link_to_a_model_that_was_not_opened_begins_nothing(app: App, worker: FakeWorker, folder: Path) -> None:
    at = app(model="plain.py:Plain")
    assert "Open a model of yours" in texts(at)
    kinds = [job.request for job in worker.jobs.values() if isinstance(job.request, (Describe, Measure))]
    assert not [model for request in kinds for model in models_of(request) if model.target.startswith("plain.py")]


def test_a_connection_is_known_by_its_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = ("127.0.0.1", listening.getsockname()[1])
        with socket.create_connection(there) as client:
            here = client.getsockname()
            users = connection.users_of_connection(here[1], there[1])
            assert users is None or users == {os.geteuid()}
            assert connection.is_same_user(here, there)


def test_another_user_or_machine_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ("127.0.0.1", 5), ("127.0.0.1", 6)
    monkeypatch.setattr(connection, "users_of_connection", lambda *ports: {os.geteuid(), 4321})
    assert not connection.is_same_user(here, there)
    monkeypatch.setattr(connection, "users_of_connection", lambda *ports: set())
    assert not connection.is_same_user(here, there), "a connection that is not listed"
    monkeypatch.setattr(connection, "users_of_connection", lambda *ports: None)
    assert connection.is_same_user(here, there) and connection.is_same_user(("::ffff:127.0.0.1", 5), there)
    assert not connection.is_same_user(("192.168.0.7", 5), there) and not connection.is_same_user(None, there)


def test_a_browser_cannot_write_the_sign_itself() -> None:
    headers = [(SAME_USER.encode(), b"yes"), (b"host", b"localhost")]
    assert server._without_sign({"headers": headers}) == [(b"host", b"localhost")]
