"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ... --weights FILE ... --predict]`.

The server imports this file for `app`; each visit runs it as a script.
"""

from __future__ import annotations

from threading import Thread

from streamlit import App

from explorer.ui.server import Visits, send_at_once, wait_for_pause


def get_ready() -> None:
    """Imports what the pages need before the first visit, then starts the worker, which loads torch.

    A visit that needs the worker starts it at once.
    """
    import explorer.ui.navigation  # noqa: F401
    from explorer.ui.session import backend
    from explorer.ui.shared.charts import import_plotly

    import_plotly()
    wait_for_pause()
    backend.worker().warm()


if __name__ == "__main__":
    from explorer.ui.navigation import main

    main()
else:
    from starlette.middleware import Middleware

    send_at_once()
    Thread(target=get_ready, daemon=True).start()
    app = App(__file__, middleware=[Middleware(Visits)])
