"""Additions to Streamlit's server: headers, a preview in the document, answers to clicks, connections without delay.

app.py installs them. They stand apart because app.py also runs as the script of each visit, which needs none of them.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import streamlit
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

from explorer.errors import ExplorerError
from explorer.jobs.connection import is_same_user
from explorer.record.base import from_json, to_json
from explorer.ui import components
from explorer.ui.session.address import SAME_USER, visit_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PRELOADED = ("BidiComponent", "PlotlyChart", "recordbatch", "serialization")
FRAMING = [(b"x-frame-options", b"DENY"), (b"content-security-policy", b"frame-ancestors 'none'")]
ROOT = '<div id="root"></div>'
"""The element of Streamlit's document that the page fills."""
PREVIEW = "/preview"
ANSWER = "/answer"
NEWS = "/news"
MOST_BYTES = 1_000_000
"""Of a question, which may name a thousand blocks."""
PICTURE_S = 2.5
"""Time within which a visit has drawn its first picture, on two cores."""
_visited = Event()
"""Set by each visit; `wait_for_pause` clears it."""


class Visits:
    """Refuses requests of other sites, and adds headers to each response that keep them from framing the page.

    A document also names the browser's part of Plotly, 4.7 MB, and of components. Without the name a browser would load
    it after the page is made: Streamlit requests a file with the first element of its kind.

    The document of Explore has first words and requests PREVIEW, an earlier run: a browser runs scripts for a second
    before the page draws anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, static = app, Path(streamlit.__file__).parent / "static"
        document = (static / "index.html").read_text(encoding="utf-8").replace(ROOT, ROOT + components.preview())
        self.document = HTMLResponse(document, headers={"cache-control": "no-cache"})
        early = [file.name for file in static.glob("static/js/*.js") if file.name.partition(".")[0] in PRELOADED]
        self.links = [(b"link", f"</static/js/{name}>; rel=modulepreload".encode()) for name in early]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_foreign(scope):
            await _refuse(scope, receive, send)
            return
        if (query := visit_of(scope)) is not None:
            _visited.set()
            if not is_sent_by_a_site(scope):
                Thread(target=begin, args=(query,), daemon=True).start()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_page = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/html")
                headers = [*message["headers"], *FRAMING, *(self.links if is_page else [])]
                message = {**message, "headers": headers}
            await send(message)

        sign = [(SIGN, _sign_of(scope))] if scope["type"] == "websocket" else []  # 10 ms; no other request needs it
        scope = {**scope, "headers": [*_without_sign(scope), *sign]}
        answer: ASGIApp = self.app if query is None else self.document
        if scope["type"] == "http" and scope["path"] == PREVIEW:
            answer = await asyncio.to_thread(answer_preview, Request(scope))
        elif scope["type"] == "http" and scope["path"] == ANSWER:
            answer = await answer_click(Request(scope, receive))
        elif scope["type"] == "http" and scope["path"] == NEWS:
            answer = await asyncio.to_thread(answer_news, Request(scope))
        await answer(scope, receive, send_with_headers)


def is_foreign(scope: Scope) -> bool:
    """Whether a request of any route comes from another site: by its host, its origin and what the browser marks.

    A link on another site may open the page: such a visit shows the page and begins no run before its window asks.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host"), headers.get("origin")
    if not is_host_allowed(host):
        return True
    if origin is not None and urlsplit(origin).netloc != host:
        return True
    opens_a_window = headers.get("sec-fetch-dest") == "document" and scope.get("method") == "GET"
    return is_sent_by_a_site(scope) and not opens_a_window


def is_sent_by_a_site(scope: Scope) -> bool:
    """Whether a page of another site or port sent the request, or a browser that only guesses a visit (prefetch)."""
    headers = Headers(scope=scope)
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or "sec-purpose" in headers


SIGN = SAME_USER.encode()


def _without_sign(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope.get("headers", ()) if name != SIGN]


def _sign_of(scope: Scope) -> bytes:
    return b"yes" if is_same_user(scope.get("client"), scope.get("server")) else b"no"


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    text = "This request comes from another site, and this server answers its own page only."
    await PlainTextResponse(text, status_code=403)(scope, receive, send)


def answer_preview(request: Request) -> Response:
    """The parts of an earlier run as JSON; no content if no earlier run answers the visit."""
    from explorer.ui.explore.preview import preview

    parts = preview(request.query_params, request.cookies)
    return JSONResponse(parts) if parts is not None else Response(status_code=204)


async def answer_click(request: Request) -> Response:
    """What a click or press on the Explore page changes, as JSON; no content if the page is gone."""
    from explorer.ui.explore.desk import AnswerRequest, answer_to

    n_bytes = int(request.headers.get("content-length", 0))
    if request.method != "POST" or not 0 < n_bytes <= MOST_BYTES:
        text = f"A question about a click is a POST of at most {MOST_BYTES:,} bytes; reload the page."
        return PlainTextResponse(text, status_code=400)
    try:
        question = from_json(await request.body(), AnswerRequest)
    except ExplorerError as error:
        return PlainTextResponse(
            f"The question about a click cannot be read: {error} Reload the page.", status_code=400
        )
    answer = await asyncio.to_thread(answer_to, question)
    return Response(to_json(answer), media_type="application/json") if answer is not None else Response(status_code=204)


def answer_news(request: Request) -> Response:
    """How often the job had news, by which components/news.js knows whether to draw; 404 without such a job."""
    from explorer.ui.session import backend

    job = backend.worker().job(request.query_params.get("job", ""))
    if job is None:
        return PlainTextResponse("This app knows no such job; reload the page.", status_code=404)
    return PlainTextResponse(str(job.n_news), headers={"cache-control": "no-store"})


def begin(query: dict[str, str]) -> None:
    """Submits what the visit will measure: the browser takes most of a second until its window asks for it."""
    from explorer.ui.explore import work

    work.begin(query)


def wait_for_pause() -> None:
    """Returns once no visit has begun for PICTURE_S. What loads before would delay a visit's first picture."""
    while _visited.wait(PICTURE_S):
        _visited.clear()


def send_at_once() -> None:
    """Switches Nagle's algorithm off for each connection that this process accepts.

    asyncio does so for sockets of its own making, not for the one that Streamlit hands it. Each small file, and each
    message of a rerun, would wait 40 ms for the browser's delayed acknowledgement of the one before.
    """
    accept = socket.socket.accept

    def accept_without_delay(listening: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = accept(listening)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return connection, address

    socket.socket.accept = accept_without_delay  # type: ignore[assignment, method-assign]
