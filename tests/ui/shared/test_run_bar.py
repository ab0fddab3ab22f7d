"""Run, and what is under way beside it."""

from __future__ import annotations

from explorer.jobs.protocol import Compare
from tests.ui.explore.visits import ALL, App
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import say


def test_a_run_pressed_while_something_runs_starts_nothing(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    at.session_state["explore"].job.asked = True
    at.run()
    assert len(worker.of(Compare)) == 1
