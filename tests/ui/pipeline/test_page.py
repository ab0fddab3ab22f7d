"""The Pipeline page with a worker that knows the answers: cuts, toggles, prediction, run, address, failure."""

from __future__ import annotations

from typing import Any

import pytest

from explorer.plan.catalogue import own_samples
from explorer.record import Failure
from explorer.ui.session import backend
from tests.ui.page_driver import address, figures, graph_data, texts, widget
from tests.ui.pipeline.cutting import CUT, stages_at
from tests.ui.pipeline.pipeline_driver import (
    Open,
    PipelineWorker,
    chosen,
    policy,
    press,
    run,
    say,
    settled,
)


def test_the_number_of_stages_cuts_into_even_times(visit: Open) -> None:
    """Every block of the made-up profile takes the same time."""
    at = visit()
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert stages_at(at) == [2] * 5
    assert figures(at)["Plan"] == "5 stages"


def test_a_block_inside_a_block_is_said_to_be_left_out_of_the_prediction(visit: Open) -> None:
    at = say(visit(), on=["blocks.1"])
    assert "leaves out" not in texts(at)
    answer = texts(say(at, on=["blocks.2.mlp"])).replace("\\", "")
    assert "leaves out what is recomputed inside one (blocks.2.mlp)" in answer


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


def test_the_batch_of_a_transformers_model_can_be_changed(visit: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "samples", lambda: own_samples(["hf:GPT2Config"]))
    at = visit()
    widget(at, "number_input", "argument_batch").set_value(8)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    assert settled(at).session_state["draft"].spec.model.arguments == {"batch": 8}
    assert not at.session_state["pipeline"].job.failure


def test_what_is_known_to_go_wrong_stands_beside_run(visit: Open) -> None:
    at = visit(cuts="3", microbatches="1")
    assert "Known before any run" in texts(at)
    assert "needs at least as many microbatches as stages" in texts(at)
    assert "Known before any run" not in texts(visit())
