"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ... --weights FILE ... --predict]`.

The server imports this file for `app`; each visit runs it as a script.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit
from streamlit import App

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

FRAMING = [(b"x-frame-options", b"DENY"), (b"content-security-policy", b"frame-ancestors 'none'")]
# Streamlit's scripts for charts (4.7 MB) and components. The browser loads them while the server draws the page.
# A comment, as Streamlit writes a string that stands alone in this file onto the page.
CHUNKS = ("PlotlyChart", "BidiComponent", "serialization", "recordbatch", "_arrayReduce")


class Headers:
    """Adds headers: other sites cannot show the page in a frame, and a page's document preloads scripts."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        scripts = Path(streamlit.__file__).parent / "static" / "static" / "js"
        chunks = [path.name for name in CHUNKS for path in scripts.glob(f"{name}.*.js")]
        self.preload = [(b"link", f"<./static/js/{name}>; rel=modulepreload".encode()) for name in chunks]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_page = any(name == b"content-type" and b"html" in value for name, value in message["headers"])
                message = {**message, "headers": [*message["headers"], *FRAMING, *(self.preload if is_page else [])]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


def get_ready() -> None:
    """Starts the worker, which loads torch, and imports what the pages need, before the first visit."""
    import explorer.ui.navigation  # noqa: F401
    from explorer.ui.session import backend

    backend.worker().warm()
    import_module("pandas")  # Streamlit imports it for the first component of a page


if __name__ == "__main__":
    from explorer.ui.navigation import main

    main()
else:
    from threading import Thread

    from starlette.middleware import Middleware

    Thread(target=get_ready, daemon=True).start()
    app = App(__file__, middleware=[Middleware(Headers)])
