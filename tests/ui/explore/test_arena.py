"""The Arena tab: who takes part and under which budgets is asked of the worker; nothing runs until it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import RunArena
from explorer.record.arena import ARENA_REPEATS
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import settle, texts

App = Callable[..., AppTest]


def open_tab(at: AppTest) -> AppTest:
    at.session_state["tabs"] = "Arena"
    return settle(at.run())


def test_chosen_planners_and_budgets_are_what_runs(app: App, worker: FakeWorker) -> None:
    at = open_tab(app())
    at.multiselect(key="arena_rivals").set_value(["greedy", "rotor"])
    at.button_group(key="arena_budgets").set_value([0.3, 0.9]).run()
    at.button(key="arena_run").click().run()
    (job,) = worker.of(RunArena)
    assert (job.request.only, job.request.shares) == (("greedy", "rotor"), (0.3, 0.9))
    drawn = at.session_state["draft"].spec
    assert job.request.spec == msgspec.structs.replace(drawn, n_repeats=ARENA_REPEATS), "often enough to decide"


def test_nobody_or_no_budget_cannot_run(app: App, worker: FakeWorker) -> None:
    at = open_tab(app())
    assert not at.button(key="arena_run").disabled
    at.multiselect(key="arena_rivals").set_value([]).run()
    assert at.button(key="arena_run").disabled
    at.multiselect(key="arena_rivals").set_value(["greedy"])
    at.button_group(key="arena_budgets").set_value([]).run()
    assert at.button(key="arena_run").disabled and not worker.of(RunArena)


def reports(at: AppTest) -> int:
    return [button.label for button in at.get("download_button")].count("Report (HTML)")


def test_what_came_is_drawn_and_can_be_taken_away(app: App) -> None:
    at = open_tab(app())
    assert not at.get("plotly_chart") and reports(at) == 1, "that of the run, in the bar"
    at = settle(at.button(key="arena_run").click().run())
    assert len(at.get("plotly_chart")) == 1 and "Rotor" in texts(at)
    assert reports(at) == 2
    assert not at.button(key="arena_run").disabled, "and it can run again"
