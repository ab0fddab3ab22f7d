"""What the worker does for the page: read, price, run, and found again after a refresh."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Describe, ProfileStages, RunPipeline
from tests.ui.page_driver import address, figures, texts, widget
from tests.ui.pipeline.cutting import CUT
from tests.ui.pipeline.pipeline_driver import (
    GRAPH,
    SCRIPT,
    Open,
    PipelineWorker,
    run,
    say,
    settled,
)


def test_the_first_visit_reads_and_prices_the_model_and_cuts_it_in_two(visit: Open, worker: PipelineWorker) -> None:
    at = visit()
    assert [type(job.request) for job in worker.jobs.values()] == [Describe, ProfileStages]
    assert figures(at)["Plan"] == "2 stages"
    assert "predicted" in texts(at)
    assert figures(at)["Gradients"] == "not compared"
    assert not worker.of(RunPipeline)


def test_run_measures_and_says_how_many_gradients_are_equal(visit: Open, worker: PipelineWorker) -> None:
    at = run(say(visit(), cuts=CUT))
    n = len(GRAPH.chain)
    assert figures(at)["Gradients"] == f"{n} of {n}"
    (job,) = worker.of(RunPipeline)
    assert [len(stage) for stage in job.request.spec.plan.stages] == [3, 3, 4]
    assert job.request.engine == "inproc"
    assert job.request.profile is not None
    assert "measured" in texts(at)


def test_an_older_run_is_never_shown_as_this_plan(visit: Open, worker: PipelineWorker) -> None:
    at = run(say(visit(), cuts=CUT))
    measured = figures(at)["Step"]
    at = say(at, cuts=CUT[:1])
    assert figures(at)["Gradients"] == "not compared"
    assert f"an earlier plan: {measured}" in [metric.delta for metric in at.metric]
    at = say(at, cuts=CUT)
    assert figures(at)["Gradients"] == f"{len(GRAPH.chain)} of {len(GRAPH.chain)}"
    assert len(worker.of(RunPipeline)) == 1


def test_a_refresh_finds_the_run_under_way(visit: Open, worker: PipelineWorker) -> None:
    worker.waits = True
    at = visit()
    at = at.button(key="pipeline_run").click().run()
    assert not at.exception
    (job,) = worker.of(RunPipeline)
    assert address(at)["job"] == job.id
    again = AppTest.from_string(SCRIPT, default_timeout=60)
    for name, value in address(at).items():
        again.query_params[name] = value
    again.run()
    assert again.session_state["pipeline"].job.id == job.id
    job.finish(worker.run(job.request.spec, job.request.engine))
    assert figures(settled(again.run()))["Gradients"].endswith(f"of {len(GRAPH.chain)}")


def test_a_model_that_is_only_foreseen_is_not_split_until_predict_is_off(visit: Open, worker: PipelineWorker) -> None:
    at = visit(predict="1")
    assert not worker.jobs and at.button(key="pipeline_run").disabled
    assert "Stages are priced by real steps" in at.info[0].value and address(at)["predict"] == "1"
    at = settled(widget(at, "toggle", "option_predict").set_value(False).run())
    assert worker.of(ProfileStages) and not at.info and not at.button(key="pipeline_run").disabled
