"""The Pipeline page with a worker that knows the answers: cuts, toggles, prediction, run, address, failure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Describe, ProfileStages, RunPipeline
from explorer.plan.catalogue import own_samples
from explorer.plan.pipeline.cuts import stages_by
from explorer.record import Failure, Policy
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.session import backend
from tests import pipelines
from tests.ui.page_driver import address, figures, graph_data, message, texts, widget
from tests.ui.pipeline.pipeline_driver import (
    GRAPH,
    SCRIPT,
    Open,
    PipelineWorker,
    chosen,
    policy,
    press,
    run,
    say,
    settled,
)

CUT = ["blocks.0>blocks.1", "blocks.3>blocks.4"]


def test_the_first_visit_reads_and_prices_the_model_and_cuts_it_in_two(visit: Open, worker: PipelineWorker) -> None:
    at = visit()
    assert [type(job.request) for job in worker.jobs.values()] == [Describe, ProfileStages]
    assert figures(at)["Plan"] == "2 stages"
    assert "predicted" in texts(at)
    assert figures(at)["Gradients"] == "not compared"
    assert not worker.of(RunPipeline)


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


def stages_at(at: AppTest) -> list[int]:
    """How many blocks of the chain each stage has."""
    labels = graph_data(at)["labels"]
    stages = [labels[fqn][5] for fqn in GRAPH.chain]
    return [stages.count(stage) for stage in range(max(stages) + 1)]


def test_the_number_of_stages_cuts_into_even_times(visit: Open) -> None:
    """Every block of the made-up profile takes the same time."""
    at = visit()
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert stages_at(at) == [2] * 5
    assert figures(at)["Plan"] == "5 stages"


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


def test_a_block_inside_a_block_is_said_to_be_left_out_of_the_prediction(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    assert "leaves out" not in texts(at)
    answer = texts(say(at, on=["blocks.2.mlp"])).replace("\\", "")
    assert "leaves out what is recomputed inside one (blocks.2.mlp)" in answer


def test_a_toggle_here_is_the_policy_everywhere(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    assert policy(at) == Policy.recompute(["blocks.1"])
    assert graph_data(at)["on"] == ["blocks.1"]
    assert "1 block recomputed" in texts(at)
    at = say(at, on=["blocks.1", "blocks.2"])
    assert policy(at) == Policy.recompute(["blocks.1", "blocks.2"])


def test_a_policy_from_elsewhere_is_drawn_and_keeps_the_click_under_way(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    answer = message(at, on=["blocks.1", "blocks.3"])
    draft = at.session_state["draft"]
    draft.spec = msgspec.structs.replace(draft.spec, policy=Policy.recompute(["head"]))
    at.session_state[pipeline_state.WIDGET] = answer
    at = settled(at.run())
    assert graph_data(at)["on"] == ["blocks.3", "head"]
    assert set(policy(at).blocks) == {"blocks.3", "head"}


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


@pytest.mark.parametrize(
    ("kind", "name", "key", "typed"),
    [
        ("number_input", "n_microbatches", "pipeline_microbatches", (4, 8, 4, 8)),
        ("selectbox", "schedule", "pipeline_schedule", ("GPipe", "1F1B", "GPipe", "1F1B")),
        ("selectbox", "n_ranks", "pipeline_n_ranks", (1, 2, 3, 2)),
        ("segmented_control", "engine", "pipeline_engine", ("replay", "procs", "inproc", "replay")),
        ("toggle", "keyed_rng", "pipeline_keyed_rng", (False, True, False, True)),
    ],
)
def test_every_change_in_a_row_counts(visit: Open, kind: str, name: str, key: str, typed: tuple[Any, ...]) -> None:
    at = visit(cuts="1.2.3.4.5", schedule="Interleaved1F1B" if name == "n_ranks" else "1F1B", microbatches="6")
    for value in typed:
        at = settled(widget(at, kind, key).set_value(value).run())
        assert chosen(at, name) == value
        assert widget(at, kind, key).value == value
    at = settled(at.run())
    assert chosen(at, name) == typed[-1]


def test_the_address_restores_the_plan(visit: Open) -> None:
    at = say(visit(), cuts=CUT, on=["blocks.2"])
    widget(at, "selectbox", "pipeline_schedule").set_value("GPipe")
    widget(at, "number_input", "pipeline_microbatches").set_value(8)
    widget(at, "selectbox", "pipeline_checkpoint").set_value("except_last")
    at = settled(widget(at, "toggle", "pipeline_keyed_rng").set_value(False).run())
    again = visit(**address(at))
    assert sorted(graph_data(again)["cuts"]) == CUT
    assert policy(again) == policy(at)
    assert again.session_state["pipeline"].choices == at.session_state["pipeline"].choices
    assert chosen(again, "schedule") == "GPipe"


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ({"cuts": "3.x"}, "no ascending"),
        ({"cuts": "3", "schedule": "2F2B"}, "2F2B"),
        ({"microbatches": "0"}, "microbatches=0"),
        ({"cuts": "40"}, "behind block 40"),
    ],
)
def test_a_broken_plan_in_a_link_says_so_and_the_page_works(visit: Open, query: dict[str, str], answer: str) -> None:
    at = visit(model="sample_models/gpt.py", **query)
    assert answer in texts(at).replace("\\", "")
    assert figures(at)["Plan"] == "2 stages"


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


def test_a_rank_that_ends_is_named_and_can_be_closed(visit: Open, worker: PipelineWorker) -> None:
    worker.ended = Failure(kind="out of memory", sentence="Rank 1 failed in 1F2: out of memory."), 1
    at = run(visit())
    assert "rank 1" in texts(at)
    assert "Rank 1 failed in 1F2" in texts(at)
    assert figures(at)["Gradients"] == "not compared"
    at = press(at, "close_pipeline_run_failed")
    assert "failed in 1F2" not in texts(at)


def test_a_plan_that_cannot_run_says_why_and_run_is_off(visit: Open) -> None:
    at = visit()
    widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B")
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert "5 stages" in at.error[0].value
    assert at.button(key="pipeline_run").disabled


def test_stages_that_share_one_rank_are_no_pipeline(visit: Open) -> None:
    at = visit()
    assert not at.info
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    assert "one rank" in at.info[0].value


def test_a_schedule_that_multiplies_recompute_warns_beside_the_schedule(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(4).run())
    assert not at.warning
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("ZBVZeroBubble").run())
    assert "splits backward" in at.warning[0].value


def test_go_to_scrolls_to_where_a_stage_begins(visit: Open) -> None:
    at = say(visit(), cuts=CUT)
    at.session_state["pipeline"].jump = ("blocks.4", 1)
    assert graph_data(at.run())["jump"] == {"id": "blocks.4", "n": 1}


def test_what_is_known_to_go_wrong_stands_beside_run(visit: Open) -> None:
    at = visit(cuts="3", microbatches="1")
    assert "Known before any run" in texts(at)
    assert "needs at least as many microbatches as stages" in texts(at)
    assert "Known before any run" not in texts(visit())


def test_the_batch_of_a_transformers_model_can_be_changed(visit: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "samples", lambda: own_samples(["hf:GPT2Config"]))
    at = visit()
    widget(at, "number_input", "argument_batch").set_value(8)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    assert settled(at).session_state["draft"].spec.model.arguments == {"batch": 8}
    assert not at.session_state["pipeline"].job.failure


def test_a_model_that_is_only_foreseen_is_not_split_until_predict_is_off(visit: Open, worker: PipelineWorker) -> None:
    at = visit(predict="1")
    assert not worker.jobs and at.button(key="pipeline_run").disabled
    assert "Stages are priced by real steps" in at.info[0].value and address(at)["predict"] == "1"
    at = settled(widget(at, "toggle", "option_predict").set_value(False).run())
    assert worker.of(ProfileStages) and not at.info and not at.button(key="pipeline_run").disabled
