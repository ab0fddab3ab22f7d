"""Requests of other sites: no route answers one, none begins a run, and a run that no window claims ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from explorer.ui import server
from explorer.ui.explore import work
from explorer.ui.session import page_job
from explorer.ui.session.address import SAME_USER
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import App, start_only

HOST = "localhost:8501"
ROUTES = (
    "/",
    "/explore",
    "/preview",
    "/lab",
    "/_stcore/health",
    "/_stcore/upload_file/a/b",
    "/media/a",
    "/static/a.js",
)
FOREIGN: dict[str, dict[str, str]] = {
    "a foreign host": {"host": "evil.example"},
    "a host that ends like ours": {"host": "localhost.evil.example"},
    "no host": {"host": ""},
    "a foreign origin": {"origin": "https://evil.example"},
    "another port": {"origin": "http://localhost:3000"},
    "an opaque origin": {"origin": "null"},
    "a picture on another site": {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"},
    "a script of another port": {"sec-fetch-site": "same-site", "sec-fetch-dest": "empty"},
    "a frame": {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"},
    "a foreign host that opens a window": {"host": "evil.example", "sec-fetch-dest": "document"},
}
OPENED = {
    "by a link of another site": {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"},
    "by a page on another port": {"sec-fetch-site": "same-site", "sec-fetch-dest": "document"},
    "by a guess": {"sec-fetch-site": "none", "sec-fetch-dest": "document", "sec-purpose": "prefetch;prerender"},
}
OWN: dict[str, dict[str, str]] = {
    "typed": {"sec-fetch-site": "none", "sec-fetch-dest": "document"},
    "of the page": {"sec-fetch-site": "same-origin", "sec-fetch-dest": "empty", "origin": f"http://{HOST}"},
    "of an old browser or a script": {},
}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The queries that visits began."""
    queries: list[dict[str, str]] = []

    class AtOnce:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
            target(*args)

        def start(self) -> None:
            pass

    monkeypatch.setattr(server, "Thread", AtOnce)
    monkeypatch.setattr(server, "begin", queries.append)
    return queries


def answered(headers: dict[str, str], path: str, *, kind: str = "http", method: str = "GET") -> int:
    """Status of a request; 101: the socket was passed on."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        signs = [value for name, value in scope["headers"] if name == server.SIGN]
        assert signs == ([b"no"] if kind == "websocket" else []), "a window alone: the sign costs 10 ms a request"
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start if kind == "http" else {"type": "websocket.accept"})

    async def send(message: Any) -> None:
        codes = {"websocket.accept": 101, "websocket.close": 403}
        if "status" in message or message["type"] in codes:
            statuses.append(message.get("status") or codes[message["type"]])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    sent = {"host": HOST, SAME_USER: "yes"} | headers
    raw = [(name.encode(), value.encode()) for name, value in sent.items() if value]
    scope = {"type": kind, "path": path, "query_string": b"", "headers": raw, "method": method}
    asyncio.run(server.Visits(app)(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize("sign", FOREIGN)
def test_no_route_answers_another_site(sign: str, begun: list[dict[str, str]]) -> None:
    for method in ("GET", "POST"):
        assert {answered(FOREIGN[sign], path, method=method) for path in (*ROUTES, "/answer")} == {403}
    assert answered(FOREIGN[sign], "/_stcore/stream", kind="websocket") == 403
    assert not begun


@pytest.mark.parametrize("sign", OPENED)
def test_a_visit_from_another_site_is_shown_and_begins_nothing(sign: str, begun: list[dict[str, str]]) -> None:
    assert answered(OPENED[sign], "/") == 200
    assert not begun


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("sign", OWN)
def test_own_requests_are_answered(sign: str, begun: list[dict[str, str]]) -> None:
    assert {answered(OWN[sign], path) for path in ROUTES} <= {200, 204}
    assert answered(OWN[sign], "/_stcore/stream", kind="websocket") == 101
    assert bool(begun) == (sign == "typed")


LARGE = {"model": "sample_models/gpt.py", "size": "gpu"}


@pytest.mark.usefixtures("app")
def test_a_run_that_no_window_claims_ends(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []

    class Timer:
        def __init__(self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
            timers.append(lambda: function(*args))

        def start(self) -> None:
            pass

    monkeypatch.setattr(page_job, "Timer", Timer)
    monkeypatch.setattr(worker, "answer", lambda job: None)
    work.begin(LARGE)
    (first,) = worker.jobs.values()
    timers.pop()()
    assert first.cancelled, "no window came"
    work.begin(LARGE)
    second = list(worker.jobs.values())[-1]
    at = start_only(**LARGE)
    assert at.session_state["explore"].job.id == second.id
    timers.pop()()
    assert not second.cancelled


@pytest.mark.usefixtures("app")
def test_a_job_counts_its_news(worker: FakeWorker) -> None:
    work.begin(LARGE)
    (job,) = worker.jobs.values()
    job.n_news = 7
    for id, text in ((job.id, (200, b"7")), ("gone", (404, b"This app knows no such job; reload the page."))):
        news = server.answer_news(Request({"type": "http", "query_string": f"job={id}".encode()}))
        assert (news.status_code, news.body) == text


def clicked(body: bytes, *, method: str = "POST", n_bytes: int | None = None) -> tuple[int, bytes]:
    """Status and text for a question about a click."""

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    length = str(len(body) if n_bytes is None else n_bytes).encode()
    scope = {"type": "http", "method": method, "headers": [(b"content-length", length)]}
    response = asyncio.run(server.answer_click(Request(scope, receive)))
    return response.status_code, bytes(response.body)


def test_a_question_about_a_click_is_answered_or_refused_in_a_sentence(app: App) -> None:
    at = app()
    click = {"n": 1, "kind": "on", "ids": ["head"]}
    question = {"graph": at.session_state["draft"].widget, "steps": [click]}
    status, body = clicked(json.dumps(question).encode())
    assert status == 200 and json.loads(body)["cells"][-1]["value"] == "0 of 6 blocks and 1 more"
    assert clicked(json.dumps(question | {"graph": "of no page"}).encode()) == (204, b"")
    for refused in (
        clicked(b""),
        clicked(b"{"),
        clicked(b"[]"),
        clicked(json.dumps(question | {"steps": 3}).encode()),
        clicked(json.dumps(question | {"steps": [click | {"kind": "of no kind"}]}).encode()),
        clicked(json.dumps(question).encode(), method="GET"),
        clicked(json.dumps(question).encode(), n_bytes=server.MOST_BYTES + 1),
    ):
        assert refused[0] == 400 and refused[1].endswith(b"eload the page."), refused
