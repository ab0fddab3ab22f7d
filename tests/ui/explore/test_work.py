"""The tabs beside the graph before and after a run; what the worker does for them: cancelled, failed, not fitting."""

from __future__ import annotations

import msgspec
import pytest

from explorer.jobs.protocol import Compare, DrawAutograd, FindPlans, Measure
from explorer.record import KEEP_ALL, Failure, Policy
from explorer.record.measurement import Refused
from explorer.ui.explore.results import OPERATIONS, STEP, TABS, TIME
from explorer.ui.session import address as link
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import (
    ALL,
    App,
    figures,
    graph_data,
    open_tab,
    press,
    say,
    settle,
    spec,
    start_only,
    texts,
    widget,
)


def test_every_tab_shows_its_record_before_and_after_a_run(app: App, worker: FakeWorker) -> None:
    at = app()
    assert [type(job.request) for job in worker.jobs.values()] == [Measure, FindPlans]
    assert figures(at)["Step peak"] == figures(app())["Step peak"] == "104.5 MiB"
    assert len(worker.jobs) == 2, "a second visitor finds what was measured"
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]] == ["embedding", "dropout", "blocks", "norm", "head"]
    for tab in TABS:
        assert [shown.label for shown in open_tab(at, tab).tabs] == TABS
    at = press(at, "draw")
    (job,) = worker.of(DrawAutograd)
    assert job.request.block == "blocks.0" and (at.get("graphviz_chart") or "blocks.0 kept" in texts(at))
    at = open_tab(press(say(at, on=list(ALL[:2])), "run"), "Cost")
    (job,) = worker.of(Compare)
    assert (job.request.baseline.policy, job.request.candidate.policy) == (Policy(), Policy.recompute(ALL[:2]))
    assert figures(at)["Gradients"] == "bitwise equal" and figures(at)["Recomputed"] == "2 of 6 blocks"
    for view in (OPERATIONS, TIME, STEP):
        at.session_state["cost_view"] = view
        at = settle(at.run())
        totals = next(frame.value for frame in at.dataframe if "run" in frame.value)
        assert list(totals["run"]) == ["baseline", "candidate"]
        assert list(totals["forward"])[0] == list(totals["forward"])[1] and len(set(totals["recompute"])) == 2
        assert len(at.get("plotly_chart")) == 1
    at = open_tab(at, "Cost")
    (rows,) = [frame.value for frame in at.dataframe if "ran again" in frame.value]
    assert list(rows["block"])[1:] == [block.fqn for block in graphs.gpt(6).blocks][1:]
    again = dict(zip(rows["block"], rows["ran again"], strict=True))
    kept, candidate = (
        dict(zip(rows["block"], rows[f"saved, {run} (MiB)"], strict=True)) for run in ("baseline", "candidate")
    )
    assert (again["blocks.0"], again["blocks.1"], again["blocks.2"]) == (1, 1, 0)
    assert candidate["blocks.0"] < kept["blocks.0"] and candidate["blocks.2"] == kept["blocks.2"]
    for tab in ("Memory", "Budget", "Autograd"):
        open_tab(at, tab)
    at = open_tab(at, "Gradients")
    evidence = at.table[0].value
    assert not at.get("plotly_chart") and list(evidence["tensors"]) == list(evidence["bitwise equal"])


def test_the_memory_chart_has_an_unmeasured_policy_dashed_and_one_run_by_role_or_by_block(app: App) -> None:
    at = app()
    for stacked, words in ((True, "bytes by block, recompute on top"), (False, "Stacked area chart of bytes by role")):
        at = settle(widget(at, "toggle", "memory_by_block").set_value(stacked).run())
        assert any(words in chart.proto.alt for chart in at.get("plotly_chart"))
    assert at.get("plotly_chart") and not graph_data(at)["line"]
    at = say(at, on=list(ALL))
    assert graph_data(at)["line"]
    at = press(at, "run")
    assert not graph_data(at)["line"] and graph_data(at)["labels"]["blocks"][0] == "15.0 → 0.5 MiB each"
    assert graph_data(say(at, on=list(ALL[:2])))["line"]


MIB = 2**20


def test_a_button_takes_the_advice_of_the_last_reason_until_it_would_lower_nothing(app: App) -> None:
    at, taken = app(), 0
    while button := [each for each in at.button if each.key == "take_next"]:
        advice = next(line.value for line in at.text if "recomputed would lower the peak to" in line.value)
        assert button[0].label.removeprefix("Recompute ") in advice
        at = settle(button[0].click().run())
        taken += 1
        assert len(spec(at).policy.units) == taken
        assert not [each for each in at.button if each.key == "take_next"], "the reasons are about another policy"
        at = press(at, "run")
    assert taken > 1


def test_a_refresh_finds_its_run_and_the_baseline_again(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=list(ALL))
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    assert at.query_params["job"] in (job.id, [job.id])
    at.session_state["explore"].job.requested = True
    at.run()
    assert len(worker.of(Compare)) == 1, "a press while something runs starts nothing"
    again = start_only(**link.to_query(spec(at)), job=job.id)
    assert again.button(key="run").disabled and figures(again)["Step peak"].startswith("104.5 → ≈")
    worker.answer(job)
    settle(again)
    assert figures(again)["Step peak"] == "104.5 → 34.5 MiB" and "job" not in again.query_params


def test_cancel_is_a_result_and_so_is_a_worker_that_forgot_the_job(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=list(ALL))
    at.button(key="run").click().run()
    at = press(at, "cancel")
    assert worker.of(Compare)[0].cancelled and "Cancelled" in texts(at)
    assert not at.button(key="run").disabled
    at.button(key="run").click().run()
    worker.jobs.clear()
    assert "The app was restarted" in texts(settle(at))


def test_a_failure_is_a_result_and_the_page_lives_on(app: App, worker: FakeWorker) -> None:
    worker.fail_with = Failure(
        kind="out of memory",
        sentence="Asked for the moon in <b>**blocks.3**</b>.",
        hint="Take less.",
        traceback="Traceback: line 1",
        asked_bytes=2**30,
        free_bytes=2**20,
    )
    at = press(say(app(), on=list(ALL)), "run")
    assert "Asked for the moon in <b>**blocks.3**</b>." in [text.value for text in at.text]
    assert "Take less." in texts(at) and "free were 1.0 MiB" in texts(at)
    assert at.code[0].value == "Traceback: line 1"
    worker.fail_with = None
    at = press(at, "run")
    assert figures(at)["Gradients"] == "bitwise equal" and "Asked for the moon" not in texts(at)


def test_run_compares_with_what_fitted(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything kept is refused at 90 MiB, every second block recomputed fits."""
    fitting, whole = Policy.recompute(["blocks.0", "blocks.2", "blocks.4"]), worker.answer
    refused = Refused(what="everything kept", policy=KEEP_ALL, held_peak_bytes=90 * MIB, failed_in="forward")

    def answer(job: FakeJob) -> None:
        if isinstance(job.request, Measure):
            run = graphs.measured(worker.graph, msgspec.structs.replace(job.request.spec, policy=fitting))
            job.finish(msgspec.structs.replace(run, refused=(refused,)))
        elif isinstance(job.request, Compare):
            baseline = graphs.measured(worker.graph, job.request.baseline)
            pair = graphs.compared(worker.graph, job.request.candidate)
            job.finish(msgspec.structs.replace(pair, baseline=baseline))
        else:
            whole(job)

    monkeypatch.setattr(worker, "answer", answer)
    at = app()
    assert "at least 90.0 MiB, then refused" in texts(at)
    assert "at least 90.0 MiB, then refused" in texts(app())
    assert len(worker.of(Measure)) == 1
    at = press(say(at, on=list(ALL)), "run")
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == fitting, "not everything kept: that would be refused again"
    assert "Compared with the run that fitted" in texts(at) and "opened run" not in texts(at)
    assert "against what fitted" in texts(at)
