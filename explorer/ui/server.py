"""Additions to Streamlit's server: response headers, first words in the document, connections without delay, pauses.

app.py installs them. They stand apart because app.py also runs as the script of each visit, which needs none of them.
"""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import streamlit
from starlette.responses import HTMLResponse

from explorer.ui.session.address import visit_of
from explorer.view.text.explore import ABOUT

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PRELOADED = ("BidiComponent", "PlotlyChart", "recordbatch", "serialization")
FRAMING = [(b"x-frame-options", b"DENY"), (b"content-security-policy", b"frame-ancestors 'none'")]
ROOT = '<div id="root"></div>'
"""The element of Streamlit's document that the page fills."""
FIRST_WORDS = f"""{ROOT}
<style>
html:not(:has([data-testid="stApp"])) {{ color-scheme: light dark; background: light-dark(#fff, #171614); }}
#first-words {{
    position: fixed; top: 68px; left: 14px; right: 14px; margin: 0; font: 600 12.25px/1.6 "Source Sans", sans-serif;
    color-scheme: light dark; color: light-dark(#111, #edebe8); pointer-events: none;
}}
@media (min-width: 768px) {{ #first-words {{ top: 74px; left: 70px; }} }}
@media (max-width: 1000px) {{ body:has(.st-key-top) #first-words {{ display: none; }} }}
body:has(.st-key-top [data-testid="stMarkdown"], [data-testid="stException"], [role="dialog"]) #first-words,
body:has([data-testid="stMarkdown"]):not(:has(.st-key-top)) #first-words {{ display: none; }}
</style>
<p id="first-words">{ABOUT.strip("*")}</p>"""
"""The page's first sentence, where the page draws it later. The rules hide it once the page has drawn a sentence or an
error, and in a narrow window once the page has drawn buttons."""
PICTURE_S = 2.5
"""Time within which a visit has drawn its first picture, on two cores."""
_visited = Event()
"""Set by each visit; `wait_for_pause` clears it."""


class Visits:
    """Adds headers to each response that keep other sites from showing the page in a frame.

    A document also names the browser's part of Plotly, 4.7 MB, and of components. Without the name a browser would load
    it after the page is made: Streamlit requests a file with the first element of its kind.

    The document of Explore contains FIRST_WORDS. A browser runs scripts for a second before the page draws anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, static = app, Path(streamlit.__file__).parent / "static"
        document = (static / "index.html").read_text(encoding="utf-8").replace(ROOT, FIRST_WORDS)
        self.document = HTMLResponse(document, headers={"cache-control": "no-cache"})
        early = [file.name for file in static.glob("static/js/*.js") if file.name.partition(".")[0] in PRELOADED]
        self.links = [(b"link", f"</static/js/{name}>; rel=modulepreload".encode()) for name in early]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (query := visit_of(scope)) is not None:
            _visited.set()
            Thread(target=begin, args=(query,), daemon=True).start()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_page = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/html")
                headers = [*message["headers"], *FRAMING, *(self.links if is_page else [])]
                message = {**message, "headers": headers}
            await send(message)

        await (self.app if query is None else self.document)(scope, receive, send_with_headers)


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
