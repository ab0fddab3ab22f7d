"""Open a model of yours: what is typed is read, asked about or refused in place; a link opens nothing by itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from streamlit import config
from streamlit.testing.v1 import AppTest

from explorer.jobs import connection
from explorer.record.graph import ModelRef
from explorer.ui import server
from explorer.ui.session import backend
from explorer.ui.session.address import SAME_USER
from explorer.ui.shared import open_model
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import App, settle, spec, texts, widget

NETS = "class Part(nn.Module): ...\nclass Net(nn.Module):\n    part = Part()\n    def __init__(self, width, depth=2): 1"
WRONG = "from torch import nn\nclass Net(nn.Module)\n"
FILES = {"nets.py": NETS, "plain.py": "class Plain(nn.Module): ...\n", "wrong.py": WRONG, "notes.py": "x = 1\n"}
PLAIN = ModelRef(target="plain.py:Plain")


@pytest.fixture
def page(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page in a folder with models, its panel open."""
    config.get_config_options()  # of the project's folder, for all later tests
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    open_model._in_this_folder.clear()
    started, own = backend.samples(), backend._opened_on_page
    monkeypatch.setattr(backend, "samples", lambda: (*own(tuple({m.target for m in backend.opened()}), ()), *started))
    at = app(model=PLAIN.target)
    assert "Open a model of yours" in texts(at) and not backend.opened(), "a link opens nothing"
    at.session_state[f"{open_model.KEY}~0"] = True
    return at.run()


def typed(at: AppTest, text: str) -> AppTest:
    box = widget(at, "selectbox", "open_text")
    box.options = [*box.options, text]
    assert not box.set_value(text).run().exception
    return at


def test_a_reference_is_refused_in_place_or_opens_at_enter(page: AppTest, worker: FakeWorker) -> None:
    assert {"nets.py:Net", PLAIN.target} <= set(widget(page, "selectbox", "open_text").options)
    refused = {"gone.py": "no file", "wrong.py": "line 2", "notes.py": "explorer run notes.py"}
    before = len(worker.jobs)
    for text, words in (refused | dict.fromkeys(("net", "rm -rf:x", "folder/"), "names no model")).items():
        assert words in texts(typed(page, text)), text
    assert len(worker.jobs) == before and not backend.opened()
    assert spec(settle(typed(page, "plain.py"))).model == PLAIN
    assert len(worker.jobs) > before
    backend.check_offered(PLAIN)


def test_a_choice_and_an_argument_without_default_are_asked_for(page: AppTest) -> None:
    at = typed(page, "nets.py")
    widget(at, "button_group", "open_choice").set_value("nets.py:Net").run()
    assert not backend.opened(), "width has no default"
    at.button(key="FormSubmitter:open_form-Open").click().run()
    assert "needs width" in texts(at)
    next(field for field in at.text_input if field.label == "width").set_value("32")
    settle(at.button(key="FormSubmitter:open_form-Open").click().run())
    assert spec(at).model == ModelRef(target="nets.py:Net", arguments={"width": 32})
    backend.check_offered(spec(at).model)
    for stranger in ({"width": "/etc/passwd"}, {"width": 33}, {"depth": "x"}):
        with pytest.raises(backend.BadInput):
            backend.check_offered(ModelRef(target="nets.py:Net", arguments=stranger))


def test_only_the_user_who_started_the_app_opens_models(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "may_open", lambda: False)
    assert not [box for box in page.run().selectbox if str(box.key).startswith("open_text")]
    open_model._take_text(open_model.Opening(), page.session_state["draft"], "plain.py")
    assert not backend.opened()
    assert server._without_sign({"headers": [(SAME_USER.encode(), b"yes")]}) == [], "a browser cannot write the sign"


def test_a_connection_is_known_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert connection.users_of_connection(client.getsockname()[1], port) in (None, {os.geteuid()})
    for listed in ({os.geteuid(), 4321}, set[int](), {os.geteuid()}, None):
        monkeypatch.setattr(connection, "users_of_connection", lambda *ports, listed=listed: listed)
        assert connection.is_same_user(("127.0.0.1", 5), ("127.0.0.1", 6)) == (listed in ({os.geteuid()}, None))
    assert not connection.is_same_user(("192.168.0.7", 5), ("127.0.0.1", 6))
