"""A plan below a cap: asked of the worker, taken over, cancelled, or refused in a sentence."""

from __future__ import annotations

import msgspec

from explorer.jobs.protocol import FindJointPlan, RunPipeline
from explorer.plan.planners.joint import joint_plan
from explorer.view.drawing.units import MIB
from tests.ui.page_driver import graph_data, texts, widget
from tests.ui.pipeline.pipeline_driver import (
    Open,
    PipelineWorker,
    chosen,
    policy,
    press,
    run,
    settled,
)  # fmt: skip


def test_cuts_microbatches_and_policy_are_planned_below_a_cap(visit: Open, worker: PipelineWorker) -> None:
    at = visit()
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at = press(at, "pipeline_plan_button")
    assert policy(at).blocks
    assert "Planned below 45" in texts(at)
    shown = at.session_state["pipeline"].planned
    assert max(shown.rank_bytes) <= 45 * 2**20
    assert chosen(at, "n_microbatches") == shown.plan.n_microbatches
    assert set(graph_data(at)["on"]) == set(policy(at).blocks)
    assert not worker.of(RunPipeline)
    at = press(at, "pipeline_undo")
    assert not policy(at).units
    assert "Planned below" not in texts(at)


def test_after_a_run_the_page_says_whether_the_cap_was_kept(visit: Open, worker: PipelineWorker) -> None:
    at = visit()
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at = press(at, "pipeline_plan_button")
    assert "Cap 45" not in texts(at)
    at = run(at)
    assert "Cap 45\\.0 MiB kept\\: the fullest rank holds" in texts(at)
    joint = at.session_state["pipeline"].planned
    at.session_state["pipeline"].planned = msgspec.structs.replace(joint, cap_bytes=MIB)
    assert "Cap 1\\.0 MiB missed\\: rank" in texts(at.run())
    assert "Cap 1" not in texts(press(at, "pipeline_undo"))


def test_a_plan_below_a_cap_can_be_cancelled_and_is_dropped_where_the_page_went_on(
    visit: Open, worker: PipelineWorker
) -> None:
    at, worker.waits = visit(), True
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at.button(key="pipeline_plan_button").click().run()
    assert at.session_state["pipeline"].job.what == "FindJointPlan"
    at.run()
    at = press(at, "pipeline_cancel")
    assert "The run was cancelled" in texts(at)
    assert not policy(at).units
    at.button(key="pipeline_plan_button").click().run()
    widget(at, "selectbox", "pipeline_schedule").set_value("GPipe").run()
    job = worker.of(FindJointPlan)[-1]
    worker.plan(job, lambda: joint_plan(job.request.profile, job.request.graph, job.request.wish))
    at = settled(at.run())
    assert "changed while another was sought" in texts(at)
    assert not policy(at).units


def test_a_cap_that_nothing_keeps_is_a_sentence(visit: Open) -> None:
    at = visit()
    widget(at, "text_input", "pipeline_cap").set_value("1 MiB")
    at = press(at, "pipeline_plan_button")
    assert "No plan was found that keeps every rank below 1" in texts(at)
    assert not policy(at).units
