"""Controls of a plan that stand in menus: balance by a rule, go to a stage; AppTest itself cannot open a menu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import streamlit as st

from explorer.plan.pipeline.cuts import CutRule, stages_by
from explorer.record import ModelRef, RunSpec
from explorer.ui.pipeline import plan_panel
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.plan_panel import fitting
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.shared.draft import Draft
from explorer.view.text.pipeline import BALANCE
from tests import graphs, pipelines
from tests.ui.pipeline.pipeline_driver import Open

GRAPH = graphs.gpt(6)
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py"))
PROFILE = pipelines.priced(GRAPH, SPEC)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the browser told."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", told)
    yield told


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
    plan_panel._balance(split, GRAPH, PROFILE)
    stages = pipeline_state.stages_of(split, GRAPH)
    assert len(stages) == 3 and stages != uneven and sum(stages, ()) == GRAPH.chain
    pipeline_state.undo(split, GRAPH)
    assert pipeline_state.stages_of(split, GRAPH) == uneven, "one step of undo"


def test_more_stages_than_there_are_places_is_a_sentence_and_changes_nothing(split: PipelineState) -> None:
    before = pipeline_state.stages_of(split, GRAPH)
    plan_panel._take_stages(split, GRAPH, None, 99)
    assert split.job.failure is not None and "99" in split.job.failure.sentence
    assert pipeline_state.stages_of(split, GRAPH) == before


def test_go_to_scrolls_to_the_first_block_of_a_stage(split: PipelineState, session: dict[str, Any]) -> None:
    stages = pipeline_state.stages_of(split, GRAPH)
    for n, stage in enumerate((2, 0), 1):
        session["pipeline_jump"] = stage
        plan_panel._jump(split, GRAPH)
        assert split.jump == (stages[stage][0], n)
    session["pipeline_jump"] = 7
    plan_panel._jump(split, GRAPH)
    assert split.jump == (stages[0][0], 2), "a stage that is there no more"


def test_the_menus_offer_every_rule_and_every_stage(visit: Open) -> None:
    at = visit(cuts="1.3")
    balance, jump = at.get("menu_button")
    assert list(balance.proto.options) == list(BALANCE.values())
    assert [name for name in jump.proto.options if name] == ["stage 0", "stage 1", "stage 2"]


@pytest.mark.parametrize(("n_rows", "wanted", "n"), [(2, 4, 2), (8, 4, 4), (6, 4, 3), (1, 4, 1)])
def test_a_first_plan_fits_the_batch(n_rows: int, wanted: int, n: int) -> None:
    graph = msgspec.structs.replace(graphs.gpt(2), input_shapes=((n_rows, 8),))
    assert fitting(wanted, graph) == n
