"""Plans that the worker finds beside everything else: once for all, giving way to runs, and why there are none."""

from __future__ import annotations

from explorer.jobs.protocol import Compare, FindPlans
from explorer.record import Failure
from tests.ui.explore.sliding import slider
from tests.ui.explore.visits import ALL, App
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import say, settle, texts


def test_the_front_is_found_once_for_all_visitors(app: App, worker: FakeWorker) -> None:
    app()
    settle(say(app(), on=ALL))
    assert len(worker.of(FindPlans)) == 1


def test_the_front_gives_way_to_a_run_and_is_found_behind_it(app: App, worker: FakeWorker) -> None:
    worker.slow_plans = True
    at = app()
    (first,) = worker.of(FindPlans)
    assert not first.finished and len(slider(at)) == 1
    at = settle(say(at, on=ALL).button(key="run").click().run())
    assert first.cancelled and worker.of(Compare)[0].finished
    worker.slow_plans = False
    at.run()
    assert len(worker.of(FindPlans)) == 2
    worker.answer(worker.of(FindPlans)[1])
    assert len(slider(settle(at.run()))) > 1


def test_a_front_that_cannot_be_found_says_why(app: App, worker: FakeWorker) -> None:
    worker.slow_plans = True
    at = app()
    worker.of(FindPlans)[0].finish(failure=Failure(kind="bad input", sentence="This run is none."))
    assert "This run is none" in texts(settle(at.run()))
