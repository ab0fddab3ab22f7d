"""The graph with its cuts: a click moves a stage, every block is in view, each change counts in its order."""

from __future__ import annotations

from explorer.jobs.protocol import RunPipeline
from explorer.record import Policy
from tests.ui.page_driver import address, figures, graph_data, texts, widget
from tests.ui.pipeline.cutting import CUT
from tests.ui.pipeline.pipeline_driver import (
    GRAPH,
    Open,
    PipelineWorker,
    policy,
    press,
    say,
)


def test_every_block_of_the_chain_is_in_view_with_its_stage(visit: Open) -> None:
    data = graph_data(visit())
    shown = {row[0] for row in data["geometry"]["rows"]}
    assert set(GRAPH.chain) <= shown
    stages = [data["labels"][fqn][5] for fqn in GRAPH.chain]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1}
    assert len(data["geometry"]["cuts"]) == len(GRAPH.cuts)
    assert {cut[4] for cut in data["geometry"]["cuts"]} == {"cut: 0.1 MiB a microbatch"}


def test_a_cut_moves_stages_prediction_and_address_and_runs_nothing(visit: Open, worker: PipelineWorker) -> None:
    at = visit()
    before = figures(at)["Step"]
    at = say(at, cuts=CUT)
    assert figures(at)["Plan"] == "3 stages"
    assert widget(at, "number_input", "pipeline_stages").value == 3
    assert figures(at)["Step"] != before
    assert address(at)["cuts"] == "3.6"
    assert not worker.of(RunPipeline)


def test_a_toggle_here_is_the_policy_everywhere(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    assert policy(at) == Policy.recompute(["blocks.1"])
    assert graph_data(at)["on"] == ["blocks.1"]
    assert "1 block recomputed" in texts(at)
    at = say(at, on=["blocks.1", "blocks.2"])
    assert policy(at) == Policy.recompute(["blocks.1", "blocks.2"])


def test_undo_and_redo_walk_through_cuts_and_toggles(visit: Open) -> None:
    at = say(say(visit(), cuts=CUT), on=["head"])
    at = press(at, "pipeline_undo")
    assert graph_data(at)["on"] == []
    assert policy(at) == Policy()
    assert sorted(graph_data(at)["cuts"]) == CUT
    at = press(at, "pipeline_undo")
    assert len(graph_data(at)["cuts"]) == 1
    assert at.button(key="pipeline_undo").disabled
    at = press(press(at, "pipeline_redo"), "pipeline_redo")
    assert graph_data(at)["on"] == ["head"]
    assert sorted(graph_data(at)["cuts"]) == CUT
