"""The autograd graph of one block, drawn when it is asked for."""

from __future__ import annotations

from explorer.jobs.protocol import DrawAutograd
from tests.ui.explore.visits import App, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import settle, texts


def test_an_autograd_graph_is_drawn_on_request(app: App, worker: FakeWorker) -> None:
    at = app()
    at.session_state["tabs"] = "Autograd"
    at = settle(at.run())
    at = press(at, "draw")
    (job,) = worker.of(DrawAutograd)
    assert job.request.block == "blocks.0"
    assert at.get("graphviz_chart") or "blocks.0 kept" in texts(at)
