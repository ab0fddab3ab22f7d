"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ... --weights FILE ... --predict]`.

The server imports this file for `app`; each visit runs it as a script.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from streamlit import App

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

FRAMING = [(b"x-frame-options", b"DENY"), (b"content-security-policy", b"frame-ancestors 'none'")]


class Unframed:
    """Adds headers to each response that keep other sites from showing the page in a frame."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *FRAMING]}
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
    app = App(__file__, middleware=[Middleware(Unframed)])
