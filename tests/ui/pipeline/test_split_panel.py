"""Controls of the split: menus, ranks, own schedules, and a cap for every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import streamlit as st

from explorer.jobs.protocol import FindJointPlan, RunPipeline
from explorer.plan.pipeline.cuts import CutRule, stages_by
from explorer.plan.planners.joint import joint_plan
from explorer.record import ModelRef, RunSpec
from explorer.ui.pipeline import split_panel
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.split_panel import fitting
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.shared.draft import Draft
from explorer.view.drawing.units import MIB
from explorer.view.text.pipeline import BALANCE
from tests import graphs, pipelines
from tests.ui.page_driver import (
    address,
    graph_data,
    texts,
    widget,
)
from tests.ui.pipeline_driver import (
    GRAPH,
    Open,
    PipelineWorker,
    chosen,
    policy,
    press,
    run,
    settled,
)

SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py"))
PROFILE = pipelines.priced(GRAPH, SPEC)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Messages of the browser."""
    state: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", state)
    yield state


@pytest.fixture
def split(session: dict[str, Any]) -> PipelineState:
    one = PipelineState(draft=Draft(spec=SPEC))
    pipeline_state.cut_at(one, GRAPH, stages_by("by-parameters", GRAPH, 3))
    return one


@pytest.mark.parametrize("rule", BALANCE)
def test_a_rule_cuts_into_as_many_stages_as_there_are(
    split: PipelineState, session: dict[str, Any], rule: CutRule
) -> None:
    uneven = (GRAPH.chain[:1], GRAPH.chain[1:2], GRAPH.chain[2:])
    pipeline_state.cut_at(split, GRAPH, uneven)
    session["pipeline_balance"] = rule
    split_panel._balance(split, GRAPH, PROFILE)
    stages = pipeline_state.stages_of(split, GRAPH)
    assert len(stages) == 3 and stages != uneven and sum(stages, ()) == GRAPH.chain
    pipeline_state.undo(split, GRAPH)
    assert pipeline_state.stages_of(split, GRAPH) == uneven, "one step of undo"


def test_more_stages_than_there_are_places_is_a_sentence_and_changes_nothing(split: PipelineState) -> None:
    before = pipeline_state.stages_of(split, GRAPH)
    split_panel.take_stages(split, GRAPH, None, 99)
    assert split.job.failure is not None and "99" in split.job.failure.sentence
    assert pipeline_state.stages_of(split, GRAPH) == before


def test_the_menu_offers_every_rule(visit: Open) -> None:
    (balance,) = visit(cuts="1.3").get("menu_button")
    assert list(balance.proto.options) == list(BALANCE.values())


@pytest.mark.parametrize(("n_rows", "wanted", "n"), [(2, 4, 2), (8, 4, 4), (6, 4, 3), (1, 4, 1)])
def test_a_first_plan_fits_the_batch(n_rows: int, wanted: int, n: int) -> None:
    graph = msgspec.structs.replace(graphs.gpt(2), input_shapes=((n_rows, 8),))
    assert fitting(wanted, graph) == n


def test_the_rows_of_a_stored_run_go_when_a_schedule_is_chosen_by_name(split: PipelineState) -> None:
    pipeline_state.choose(split, "actions", (("0F0", "0B0"),))
    assert split_panel.plan_of(split, (("a",),)).schedule_name == "own schedule"
    split_panel._choose_schedule(split, "GPipe")
    assert split_panel.plan_of(split, (("a",),)).schedule_name == "GPipe"


def test_ranks_are_chosen_where_the_schedule_leaves_them_open(visit: Open) -> None:
    at = visit(cuts="1.2.3")
    assert widget(at, "selectbox", "pipeline_n_ranks").disabled
    at = settled(widget(at, "selectbox", "pipeline_schedule").set_value("Interleaved1F1B").run())
    ranks = widget(at, "selectbox", "pipeline_n_ranks")
    assert (ranks.options, ranks.value) == (["1", "2"], 2)
    at = settled(ranks.set_value(1).run())
    assert "one rank" in at.info[0].value
    assert address(at)["ranks"] == "1"
    again = visit(**address(at))
    assert widget(again, "selectbox", "pipeline_n_ranks").value == 1
    at = settled(widget(at, "number_input", "pipeline_stages").set_value(5).run())
    assert widget(at, "selectbox", "pipeline_n_ranks").value == 1


def test_cuts_microbatches_and_policy_are_planned_below_a_cap_that_a_run_keeps(
    visit: Open, pipeline_worker: PipelineWorker
) -> None:
    at = visit()
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at = press(at, "pipeline_plan_button")
    assert policy(at).blocks
    assert "Planned below 45" in texts(at)
    shown = at.session_state["pipeline"].planned
    assert max(shown.rank_bytes) <= 45 * 2**20
    assert chosen(at, "n_microbatches") == shown.plan.n_microbatches
    assert set(graph_data(at)["on"]) == set(policy(at).blocks)
    assert not pipeline_worker.of(RunPipeline)
    assert "Cap 45" not in texts(at)
    at = run(at)
    assert "Cap 45\\.0 MiB kept\\: the fullest rank holds" in texts(at)
    at.session_state["pipeline"].planned = msgspec.structs.replace(shown, cap_bytes=MIB)
    assert "Cap 1\\.0 MiB missed\\: rank" in texts(at.run())
    at = press(at, "pipeline_undo")
    assert not policy(at).units
    assert "Planned below" not in texts(at) and "Cap 1" not in texts(at)
    widget(at, "text_input", "pipeline_cap").set_value("1 MiB")
    at = press(at, "pipeline_plan_button")
    assert "No plan was found that keeps every rank below 1" in texts(at) and not policy(at).units


def test_a_plan_below_a_cap_can_be_cancelled_and_is_dropped_where_the_page_went_on(
    visit: Open, pipeline_worker: PipelineWorker
) -> None:
    at, pipeline_worker.waits = visit(), True
    widget(at, "text_input", "pipeline_cap").set_value("45 MiB")
    at.button(key="pipeline_plan_button").click().run()
    assert at.session_state["pipeline"].job.what == "FindJointPlan"
    at.run()
    at = press(at, "pipeline_cancel")
    assert "The run was cancelled" in texts(at)
    assert not policy(at).units
    at.button(key="pipeline_plan_button").click().run()
    widget(at, "selectbox", "pipeline_schedule").set_value("GPipe").run()
    job = pipeline_worker.of(FindJointPlan)[-1]
    pipeline_worker.plan(job, lambda: joint_plan(job.request.profile, job.request.graph, job.request.wish))
    at = settled(at.run())
    assert "changed while another was sought" in texts(at)
    assert not policy(at).units
