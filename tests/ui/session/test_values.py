"""Widgets show their record whatever happened in between; and a link restores all of them.

The page under test is as small as a page can be: a number that may be refused, a name, and a switch. What changes the
record from elsewhere (undo, a link, an import, another model) is one thing to a widget: the record says something else.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import re
import runpy
import socket
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import streamlit
from hypothesis import given, settings
from hypothesis import strategies as st
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.forward_msg_cache import populate_hash_if_needed
from streamlit.runtime.scriptrunner import RerunData, ScriptRunner, ScriptRunnerEvent
from streamlit.runtime.scriptrunner_utils.script_requests import ScriptRequests, ScriptRequestType
from streamlit.testing.v1 import AppTest

from explorer.errors import UnreadableFile
from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui.session import backend, values
from explorer.ui.session.address import LIMIT, from_query, to_query
from explorer.ui.session.values import bound, mend_reruns, once_a_press, session_value
from explorer.ui.shared.draft import Draft
from tests.ui.page_driver import widget

MOST = 6
NAMES = ("a", "b", "c")
START = {"number": 2, "name": "a", "switch": False}


def small_page() -> None:
    import functools

    import streamlit as st

    from explorer.ui.session.values import bound

    record = st.session_state["record"]

    def take(name: str, value: object) -> None:
        record[name] = min(value, 6) if isinstance(value, int) and name == "number" else value

    number = bound("number", record["number"], functools.partial(take, "number"))
    st.number_input("number", 0, 9, number.value, key=number.key, on_change=number.on_change)
    name = bound("name", record["name"], functools.partial(take, "name"))
    st.selectbox("name", ["a", "b", "c"], "abc".index(name.value), key=name.key, on_change=name.on_change)
    switch = bound("switch", record["switch"], functools.partial(take, "switch"))
    st.toggle("switch", switch.value, key=switch.key, on_change=switch.on_change)
    st.session_state["seen"] = {"number": number.value, "name": name.value, "switch": switch.value}


def shown(at: AppTest) -> dict[str, Any]:
    kinds = {"number": "number_input", "name": "selectbox", "switch": "toggle"}
    return {name: widget(at, kind, name).value for name, kind in kinds.items()}


changes = st.one_of(
    st.tuples(st.just("number"), st.integers(0, 9)),
    st.tuples(st.just("name"), st.sampled_from(NAMES)),
    st.tuples(st.just("switch"), st.booleans()),
)
happenings = st.lists(st.tuples(st.sampled_from(["choose", "elsewhere", "nothing"]), changes), max_size=8)


@settings(max_examples=30)
@given(happenings)
def test_widget_and_record_say_the_same_whatever_changed_last(happened: list[tuple[str, tuple[str, Any]]]) -> None:
    at = AppTest.from_function(small_page, default_timeout=60)
    record = at.session_state["record"] = dict(START)
    expected = dict(START)
    at.run()
    for who, (name, value) in happened:
        if who == "choose":
            kind = {"number": "number_input", "name": "selectbox", "switch": "toggle"}[name]
            widget(at, kind, name).set_value(value)
            expected[name] = min(value, MOST) if name == "number" else value
        elif who == "elsewhere":
            expected[name] = value = min(value, MOST) if name == "number" else value
            record[name] = value
        assert not at.run().exception
        assert record == expected == shown(at) == at.session_state["seen"]


def test_what_a_widget_was_given_is_no_choice() -> None:
    """Streamlit calls a segmented control's callback when the browser first tells the value that it was given.

    The browser keeps the value of a widget in a closed popover, and would send it back under the old key.
    """
    taken: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamlit, "session_state", {})
        first = bound("view", "one", taken.append)
        streamlit.session_state[first.key] = "one"
        first.on_change()
        assert not taken
        streamlit.session_state[first.key] = "two"
        first.on_change()
        first.on_change()
        assert taken == ["two"] and bound("view", "two", taken.append).key == first.key, "a choice keeps its widget"
        other = bound("view", "three", taken.append)
        first.on_change()
        assert taken == ["two"] and other.key != first.key, "one that was replaced has nothing to say"
        other.on_change()
        assert taken == ["two"], "another page has a widget of this key, which has no value yet: the page must live"


SPEC = RunSpec(model=ModelRef(target="m.py"), policy=Policy.recompute(["a"]))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    state: dict[str, Any] = {}
    monkeypatch.setattr(streamlit, "session_state", state)
    return state


def test_a_visitors_object_stays_until_its_code_changed(session: dict[str, Any]) -> None:
    first = session_value("draft", Draft, lambda: Draft(spec=SPEC))
    assert session_value("draft", Draft, lambda: Draft(spec=SPEC)) is first
    session["draft"] = SimpleNamespace(spec=SPEC)  # as a class of before a reload is another class
    assert session_value("draft", Draft, lambda: Draft(spec=SPEC, widget="new")).widget == "new"


names = st.text(min_size=1, max_size=20)
specs = st.builds(
    RunSpec,
    model=st.builds(
        ModelRef,
        target=names,
        size=st.none() | names,
        weights=st.just("") | names,
        arguments=st.dictionaries(names, st.integers(-5, 5) | st.booleans() | names, max_size=3),
    ),
    policy=st.builds(lambda blocks, early: Policy.recompute(blocks, early_stop=early), st.lists(names), st.booleans()),
    optimizer=st.sampled_from(["adamw", "sgd", "none"]),
    autocast=st.sampled_from(["none", "bfloat16"]),
    n_accumulation=st.integers(1, 9),
    frozen=st.lists(names).map(tuple),
    seed=st.integers(0, 99),
)


def test_a_plain_run_has_a_plain_link_and_a_thousand_blocks_fit_into_one() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"))
    assert to_query(spec) == {"model": "sample_models/gpt.py", "size": "small"} and from_query({}) is None
    many = Policy.recompute([f"blocks.{i}" for i in range(1000)])
    assert len(to_query(RunSpec(model=spec.model, policy=many))["run"]) < 6000


@given(specs)
def test_a_link_restores_the_whole_run(spec: RunSpec) -> None:
    assert from_query(to_query(spec)) == spec


def pack(text: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize(
    "run",
    [
        "not base64!",
        "YWJj",
        to_query(RunSpec(model=ModelRef(target="x"), seed=7))["run"][:-9],
        pack(b"{}"),
        pack(b'{"model": {"target": ""}, "unknown": 1}'),
        pack(b'{"model": {"target": ""}, "seed": "seven"}'),
        pack(b" " * (LIMIT + 1) + b"{}"),
    ],
    ids=["no base64", "no zlib", "cut short", "no model", "unknown field", "wrong type", "a bomb"],
)
def test_a_broken_link_is_one_sentence(run: str) -> None:
    with pytest.raises(UnreadableFile):
        from_query({"model": "x", "run": run})


def test_models_come_from_the_command_line() -> None:
    assert backend.flag_values("--model", ["--model", "a.py:f", "--model=b.py", "x"]) == ("a.py:f", "b.py")
    assert backend.flag_values("--model", ["--weights", "a.pt"]) == ()


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_cuda_is_offered_with_its_driver(monkeypatch: pytest.MonkeyPatch, driver: bool, build: str) -> None:
    monkeypatch.setattr(backend, "_has_gpu", backend._has_gpu.__wrapped__)
    monkeypatch.setattr(backend, "_DRIVERS", ("/dev/null",) if driver else ())
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    monkeypatch.setattr(backend, "version", lambda name: build)
    assert ("cuda" in backend.devices("cpu")) is (driver and not build.endswith("+cpu"))
    assert backend.devices("cuda") == ("cpu", "cuda"), "what a link names is shown all the same"


@pytest.mark.parametrize(("rerun", "counts"), [(None, 1), ([], 1), (["desk", "timer"], 1), (["timer"], 0)])
def test_a_press_counts_once(monkeypatch: pytest.MonkeyPatch, rerun: list[str] | None, counts: int) -> None:
    """A button of the fragment `desk`: Streamlit calls its callback in the rerun of the fragment `timer` too."""
    presses: list[int] = []
    monkeypatch.setattr(values, "get_script_run_ctx", lambda: SimpleNamespace(fragment_ids_this_run=rerun))
    monkeypatch.setattr(values.ThreadState, "get", lambda: SimpleNamespace(fragment_id="desk"))
    once_a_press(presses.append)(1)
    assert len(presses) == counts


def overtaken_page() -> None:
    import streamlit as st
    from streamlit.runtime.scriptrunner import RerunData, get_script_run_ctx

    from explorer.ui.session.values import whole

    runs = st.session_state.setdefault("runs", [])
    runs.append("run")

    def step(name: str) -> None:
        """A newer press arrives, and the page goes on to its next st call."""
        context = get_script_run_ctx()
        context.script_requests.request_rerun(RerunData(page_script_hash=context.page_script_hash))
        st.query_params["step"] = name
        runs.append(name)

    st.button("Press", key="press", on_click=lambda: (step("half a press"), step("press")))
    if runs[-2:] == ["press", "run"]:
        with whole():
            step("half a result")
            step("result")
        step("after it")


def test_a_newer_press_ends_no_callback_and_nothing_that_is_taken_over_whole() -> None:
    mend_reruns()
    at = AppTest.from_function(overtaken_page).run()
    at.button(key="press").click().run()
    assert not at.exception
    ends = ["half a press", "press", "run", "half a result", "result", "run"]
    assert at.session_state["runs"] == ["run", *ends], "each step but the last asks Streamlit to end the rerun"


def test_a_timer_of_a_page_that_was_left_changes_nothing() -> None:
    """A browser left a page blank, or did not leave it, if the timer fired between the press and the new page."""
    mend_reruns()
    switch, timer = RerunData(page_script_hash="new"), RerunData(page_script_hash="old", fragment_id="timer")
    requests = ScriptRequests()
    assert requests.request_rerun(switch) and requests.request_rerun(timer)
    assert requests.on_scriptrunner_ready().rerun_data == switch
    assert requests.request_rerun(timer), "the new page is being drawn"
    assert requests.request_rerun(replace(timer, page_script_hash="new"))
    own = requests.on_scriptrunner_ready().rerun_data
    assert (own.page_script_hash, own.fragment_id_queue) == ("new", ["timer"])
    assert requests.on_scriptrunner_ready().type is ScriptRequestType.STOP


def test_a_request_waits_until_what_an_ending_runner_drew_is_sent() -> None:
    """Streamlit drops the messages of a runner that another runner replaced: the tail of the page never came."""
    mend_reruns()
    later: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_later=lambda _, function, *arguments: later.append(partial(function, *arguments)))
    ending = SimpleNamespace(request_rerun=lambda data: False)
    session: Any = SimpleNamespace(_scriptrunner=ending, _event_loop=loop, _state=None)
    data = RerunData(page_script_hash="page")
    AppSession._create_scriptrunner(session, data)
    later.pop()()
    assert session._scriptrunner is ending and len(later) == 1, "it still ends"
    taken: list[RerunData] = []
    session._scriptrunner = SimpleNamespace(request_rerun=lambda data: taken.append(data) or True)
    later.pop()()
    assert taken == [data] and not later, "the runner of a later request takes this one too"


def test_streamlit_still_has_what_each_patch_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, the patch of that name may go from `mend_reruns`."""
    mend_reruns()
    accept = inspect.getclosurevars(ScriptRequests.request_rerun).nonlocals["accept"]
    switch, timer = RerunData(page_script_hash="new"), RerunData(page_script_hash="old", fragment_id="timer")
    assert accept(requests := ScriptRequests(), switch) and accept(requests, timer)
    assert requests.on_scriptrunner_ready().rerun_data != switch, "accept_of_page"
    name, sent, other = "_maybe_handle_execution_control_request", [], object()
    monkeypatch.setattr(ScriptRunner, name, inspect.getclosurevars(getattr(ScriptRunner, name)).nonlocals["end"])
    at = AppTest.from_function(overtaken_page).run()
    at.button(key="press").click().run()
    assert "press" not in at.session_state["runs"], "end_later"

    async def tell() -> None:
        session: Any = SimpleNamespace(_scriptrunner=None, _event_loop=asyncio.get_running_loop(), _state=None)
        session._enqueue_forward_msg = lambda message: sent.append("message")
        for sender in (other, None):  # the second is the runner of this session
            event: Any = ScriptRunnerEvent.ENQUEUE_FORWARD_MSG
            AppSession._handle_scriptrunner_event_on_event_loop(session, sender, event, forward_msg=ForwardMsg())
            sent.append(sender)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, tell()).result()
    assert sent == [other, "message", None], "create_after_end"


def test_a_browser_gets_every_message_whole() -> None:
    """A quick browser may have dropped the message that a hash stands for, which ends its page (streamlit#15816)."""
    message = ForwardMsg()
    message.delta.new_element.markdown.body = 10_000_000 * " "
    populate_hash_if_needed(message)
    assert not message.metadata.cacheable


def test_the_server_sends_small_messages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page loads a hundred small files: each one waited 40 ms."""
    monkeypatch.setattr(socket.socket, "accept", socket.socket.accept)  # put back at the end
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))  # no worker
        runpy.run_path(str(Path(__file__).parents[3] / "app.py"), run_name="served")

    async def delays() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = socket.socket(family=socket.AF_INET)  # as Streamlit makes it
        listening.bind(("127.0.0.1", 0))
        async with await asyncio.start_server(serve, sock=listening):
            with socket.create_connection(listening.getsockname()):
                return await accepted

    with ThreadPoolExecutor(1) as thread:  # Playwright's loop runs in the one that ran browser tests
        assert thread.submit(asyncio.run, delays()).result()


PRIVATE = {
    "_scriptrunner": "A rerun that is asked for while one ends must wait for its end.",
    "_event_loop": "A rerun that waits for the end of another looks again later.",
    "_create_scriptrunner": "Patched: what a runner drew last would be dropped by the runner behind it.",
    "_maybe_handle_execution_control_request": "Patched: a press would end within its callback, half done.",
    "_rerun_data": "Patched `request_rerun`: a timer of a page that was left has its page there.",
    "_state": "A session that has ended starts no runner.",
}
"""Streamlit's private names that the page needs, each with its reason."""


def test_each_private_name_of_streamlit_has_a_reason_and_is_there() -> None:
    root = Path(values.__file__).parents[3]
    texts = {path: path.read_text() for path in (root / "app.py", *(root / "explorer" / "ui").rglob("*.py"))}
    own = {name for text in texts.values() for name in re.findall(r"(?:self\.|def |^)(_\w+)", text, re.MULTILINE)}
    used = set(re.findall(r"\.(_[a-z]\w+)", "\n".join(texts.values())))
    others = own - PRIVATE.keys() | {"_asdict", "_stcore", "_dump_snapshot"}
    assert used - others == PRIVATE.keys()
    sources = "".join(path.read_text() for path in Path(streamlit.__file__).parent.glob("**/*.py"))
    assert not [name for name in PRIVATE if name not in sources]
