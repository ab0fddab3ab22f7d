"""A job under way, and its Cancel."""

from __future__ import annotations

from explorer.jobs.protocol import Compare
from tests.ui.explore.visits import ALL, App, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import say, texts


def test_cancel_is_a_result(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    at = press(at, "cancel")
    assert worker.of(Compare)[0].cancelled
    assert "Cancelled" in texts(at)
    assert not at.button(key="run").disabled
