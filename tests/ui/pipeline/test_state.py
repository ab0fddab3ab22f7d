"""What was decided: a plan that nobody touched is evened out, one that comes from elsewhere is drawn."""

from __future__ import annotations

import msgspec
import pytest

from explorer.jobs.protocol import ProfileStages
from explorer.plan.pipeline.cuts import stages_by
from explorer.record import Policy
from explorer.ui.pipeline import state as pipeline_state
from tests import pipelines
from tests.ui.page_driver import graph_data, message, widget
from tests.ui.pipeline.cutting import CUT, stages_at
from tests.ui.pipeline.pipeline_driver import (
    GRAPH,
    Open,
    PipelineWorker,
    policy,
    press,
    say,
    settled,
)


@pytest.mark.parametrize("touched", [False, True])
def test_a_plan_nobody_touched_is_evened_out_once_blocks_are_priced(
    visit: Open, worker: PipelineWorker, touched: bool
) -> None:
    worker.prices = False
    at = visit(waiting=True)
    assert stages_at(at) == [len(stage) for stage in stages_by("by-parameters", GRAPH, 2)] == [5, 5]
    if touched:
        at.session_state[pipeline_state.WIDGET] = message(at, cuts=CUT[:1])
        at.run()
    (job,) = worker.of(ProfileStages)
    even = pipelines.priced(GRAPH, job.request.spec)
    slow = msgspec.structs.replace(even.blocks[0], kept=msgspec.structs.replace(even.blocks[0].kept, forward_ms=6.0))
    job.finish(msgspec.structs.replace(even, blocks=(slow, *even.blocks[1:])))
    at = settled(at.run())
    assert stages_at(at) == ([3, 7] if touched else [4, 6])
    assert at.button(key="pipeline_undo").disabled != touched


def test_a_policy_from_elsewhere_is_drawn_and_keeps_the_click_under_way(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    answer = message(at, on=["blocks.1", "blocks.3"])
    draft = at.session_state["draft"]
    draft.spec = msgspec.structs.replace(draft.spec, policy=Policy.recompute(["head"]))
    at.session_state[pipeline_state.WIDGET] = answer
    at = settled(at.run())
    assert graph_data(at)["on"] == ["blocks.3", "head"]
    assert set(policy(at).blocks) == {"blocks.3", "head"}


@pytest.mark.parametrize(
    ("pressed", "cuts"), [(False, ["blocks.0>blocks.1", "blocks.4>blocks.5"]), (True, ["blocks.0>blocks.1"])]
)
def test_a_cut_in_the_rerun_of_a_redo_or_of_other_stages_counts_in_its_order(
    visit: Open, pressed: bool, cuts: list[str]
) -> None:
    at = say(visit(), cuts=["blocks.0>blocks.1"])
    at = say(at, cuts=CUT)
    before = graph_data(at)["cuts"]
    if pressed:
        at = press(at, "pipeline_undo")
        at.session_state[pipeline_state.WIDGET] = message(at, pressed=True, cuts=CUT)
    else:
        at.session_state[pipeline_state.WIDGET] = message(at, cuts=[*before, "blocks.4>blocks.5"])
    at = press(at, "pipeline_undo")
    assert sorted(graph_data(at)["cuts"]) == cuts
    at.session_state[pipeline_state.WIDGET] = message(at, cuts=[*graph_data(at)["cuts"], "norm>head"])
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(2).run())
    assert "norm>head" in graph_data(at)["cuts"]
    assert widget(at, "number_input", "pipeline_stages").value == len(graph_data(at)["cuts"]) + 1
