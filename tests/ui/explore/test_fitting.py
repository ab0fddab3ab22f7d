"""What would make it fit, as a view of the Budget tab: a press plays levers, and a row gives its line to copy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import FindFit
from explorer.record.plan import Wish
from explorer.ui.explore.fitting import VIEW
from explorer.view.text.explore import STALE
from tests import graphs
from tests.ui.fake_worker import FakeWorker, fit_of
from tests.ui.page_driver import App, open_tab, press, settle, texts


@pytest.fixture
def at(app: App) -> AppTest:
    at = open_tab(app(), "Budget")
    assert not [button for button in at.button if button.key == "find_fit"], "policies come first"
    at.session_state["budget_view"] = VIEW
    return settle(at.run())


def levers_shown(at: AppTest) -> list[str]:
    return [str(each) for frame in at.dataframe if "lever" in frame.value for each in frame.value["lever"]]


def test_a_press_plays_levers_and_each_row_has_its_line(at: AppTest, worker: FakeWorker) -> None:
    assert not worker.of(FindFit) and not levers_shown(at), "nothing is played without a press"
    at = press(at, "find_fit")
    (job,) = worker.of(FindFit)
    assert job.request.spec == at.session_state["draft"].spec and job.request.budget is None
    assert len(levers_shown(at)) == 2 and "It saves nothing here." in texts(at)
    assert at.code[0].value.startswith("explorer.apply_policy(model, ")
    at = settle(at.selectbox(key="fit_lever").select("SGD instead of AdamW").run())
    assert at.code[0].value == "optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0)"
    assert "Another optimizer." in texts(at) and "two real steps" in texts(at)


def test_a_budget_of_time_is_refused_and_one_of_memory_is_asked(at: AppTest, worker: FakeWorker) -> None:
    at.session_state["explore"].budget.wish = Wish(budget_bytes=10**9, more_time=0.1)
    at = settle(at.run())
    assert at.button(key="find_fit").disabled and "no lever is timed" in texts(at)
    at.session_state["explore"].budget.wish = Wish(budget_bytes=10**9)
    at = press(settle(at.run()), "find_fit")
    assert worker.of(FindFit)[0].request.budget == 10**9


def test_the_switch_hides_what_is_not_bitwise(at: AppTest) -> None:
    at = settle(press(at, "find_fit").toggle(key="fit_bitwise").set_value(True).run())
    assert len(levers_shown(at)) == 1 and "SGD instead of AdamW" not in levers_shown(at)


def test_other_options_make_the_answer_stale(at: AppTest) -> None:
    at = press(at, "find_fit")
    assert STALE not in texts(at)
    draft = at.session_state["draft"]
    draft.spec = replace(draft.spec, optimizer="sgd")
    assert STALE in texts(settle(at.run()))


def test_a_job_is_cancelled_at_the_run_bar(at: AppTest, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "answer", lambda job: None)
    at = at.button(key="find_fit").click().run()
    assert at.button(key="find_fit").disabled and not worker.of(FindFit)[0].finished
    at = press(at, "cancel")
    assert worker.of(FindFit)[0].cancelled and not at.button(key="find_fit").disabled and not levers_shown(at)


def test_rows_are_shown_as_they_come_and_a_cancelled_fit_says_what_it_lacks(
    at: AppTest, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "answer", lambda job: None)
    at = at.button(key="find_fit").click().run()
    (job,) = worker.of(FindFit)
    whole, lack = fit_of(graphs.measured(worker.graph, job.request.spec), None), "The fit was cut off (rows: 1)."
    job.part = replace(whole, rows=whole.rows[:1], judged_on=None, missing=lack)
    at = at.run()
    assert len(levers_shown(at)) == 1 and lack not in texts(at) and "Judged on" not in texts(at)
    at = press(at, "cancel")
    assert len(levers_shown(at)) == 1 and lack in texts(at)
