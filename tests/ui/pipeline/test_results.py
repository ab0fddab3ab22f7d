"""The tabs of the Pipeline page: each is drawn before and after a run and follows a choice; a failure is closed."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import ProfileStages
from explorer.record import Failure
from tests.ui.page_driver import texts
from tests.ui.pipeline.pipeline_driver import Open, PipelineWorker, press, run, settled

TABS = ("Schedule", "Memory", "Gradients", "Calls", "Files")


def tab(at: AppTest, name: str) -> AppTest:
    at.session_state["pipeline_tabs"] = name
    return settled(at.run())


def alts(at: AppTest) -> list[str]:
    return [chart.proto.alt for chart in at.get("plotly_chart")]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("Schedule", ["One row a rank"], ["One row a rank"]),
        ("Memory", ["Held bytes", "Stacked bars"], ["Held bytes", "Stacked bars", "Bars of the predicted"]),
        ("Gradients", [], ["Bars of the gradients"]),
        ("Calls", [], ["Bars of the runs per forward call"]),
    ],
)
def test_a_tab_has_its_charts_before_and_after_a_run(
    visit: Open, name: str, before: list[str], after: list[str]
) -> None:
    at = tab(visit(), name)
    assert [alt for alt, start in zip(alts(at), before, strict=True) if not alt.startswith(start)] == []
    at = tab(run(at), name)
    assert [alt for alt, start in zip(alts(at), after, strict=True) if not alt.startswith(start)] == []


def test_one_rank_and_one_microbatch_can_be_followed(visit: Open) -> None:
    at = tab(run(visit()), "Memory")
    assert at.selectbox(key="pipeline_rank_picked").options == ["all ranks", "rank 0", "rank 1"]
    at = settled(at.selectbox(key="pipeline_rank_picked").set_value(1).run())
    assert alts(at)[0].startswith("Held bytes over the step by kind") and "Bars of the predicted" in alts(at)[1]
    at = tab(at, "Schedule")
    follow = at.selectbox(key="pipeline_follow")
    assert len(follow.options) == 1 + at.session_state["pipeline"].choices.n_microbatches
    at = settled(follow.set_value(2).run())
    chart = next(chart for chart in at.get("plotly_chart"))
    assert '"opacity":[0.18,' in chart.proto.spec.replace(" ", ""), "the others are faded"


def test_a_failure_stays_until_it_is_closed(visit: Open, worker: PipelineWorker) -> None:
    worker.ended = Failure(kind="out of memory", sentence="Rank 1 failed in 1F2."), 1
    at = tab(run(visit()), "Files")
    for name in TABS:
        assert "Rank 1 failed in 1F2." in texts(tab(at, name))
    assert "Rank 1 failed" not in texts(press(at, "close_pipeline_run_failed"))


def test_why_the_blocks_have_no_price_stays_until_it_is_closed(visit: Open, worker: PipelineWorker) -> None:
    worker.prices = False
    at = visit(waiting=True)
    (job,) = worker.of(ProfileStages)
    job.finish(failure=Failure(kind="crash", sentence="The worker ended."))
    at = settled(at.run())
    assert "The worker ended." in texts(at) and "The worker ended." in texts(settled(at.run()))
    assert len(worker.of(ProfileStages)) == 1, "one attempt while the card stands"
    worker.prices = True
    at = settled(at.button(key="close_pipeline").click().run())
    assert "The worker ended." not in texts(at)
