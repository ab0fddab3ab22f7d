"""The plan: how many stages and where they are cut, how many microbatches, which schedule drives them."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.cuts import CutRule, atoms, stages_by
from explorer.plan.schedules import SCHEDULES, default_ranks, rows_of
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.plan import CheckpointMode, PipelinePlan
from explorer.ui import glossary, pipeline_state
from explorer.ui import pipeline_words as words
from explorer.ui import state as states
from explorer.ui.bound import show, taken
from explorer.ui.panels.headline import rows_of_figures
from explorer.ui.pipeline_figures import Figure
from explorer.ui.plan_link import MOST_MICROBATCHES
from explorer.ui.state import State
from explorer.view.nesting import ancestors


def strip(figures: tuple[Figure, ...]) -> None:
    """Five figures side by side, each with what it means and where it comes from."""
    for row in rows_of_figures(figures):
        with st.container(horizontal=True, gap="small"):
            for figure in row:
                with st.container(gap=None):
                    _figure(figure)


def _figure(figure: Figure) -> None:
    origin = glossary.ORIGIN.get(figure.origin, "")
    st.metric(
        figure.label,
        figure.value,
        figure.delta or None,
        delta_color="off",
        delta_arrow="off",
        help=f"{figure.help} {origin}".rstrip(),
    )
    st.caption(figure.origin or "\N{NO-BREAK SPACE}")


def plan_panel(split: State, state: State, graph: ModelGraph, profile: PipelineProfile | None) -> PipelinePlan:
    """The controls; returns the plan as it is drawn now."""
    _first_cut(split, state, graph, profile)
    stages = pipeline_state.stages_of(split, graph)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_plan"):
        st.number_input(
            "Stages",
            1,
            max(len(atoms(graph)), len(stages), 1),
            key=show("pipeline_stages", len(stages)),
            help=words.STAGE,
            on_change=lambda: _take_stages(split, state, graph, profile),
        )
        split["n_microbatches"] = int(
            st.number_input(
                "Microbatches",
                1,
                MOST_MICROBATCHES,
                key=show("pipeline_microbatches", split["n_microbatches"]),
                help=words.MICROBATCH,
            )
        )
        split["schedule"] = st.selectbox(
            "Schedule", SCHEDULES, key=show("pipeline_schedule", split["schedule"]), help=words.SCHEDULE
        )
    _tools(split, state, graph, profile)
    return plan_of(split, stages)


def _tools(split: State, state: State, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Balance, undo, redo, go to a stage, and what is rarely changed."""
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_tools"):
        st.menu_button(
            "Balance",
            list(words.BALANCE),
            format_func=words.BALANCE.__getitem__,
            key="pipeline_balance",
            icon=":material/balance:",
            help=words.BALANCE_HELP,
            on_click=lambda: _balance(split, state, graph, profile),
        )
        for name, help in (("undo", "Take back the last cut or toggle"), ("redo", "Make it again")):
            st.button(
                "",
                icon=f":material/{name}:",
                key=f"pipeline_{name}",
                help=help,
                disabled=not split[name],
                on_click=pipeline_state.undo,
                args=(split, state, graph),
                kwargs={"forward": name == "redo"},
            )
        stages = pipeline_state.stages_of(split, graph)
        st.menu_button(
            "Go to",
            list(range(len(stages))),
            format_func=lambda stage: f"stage {stage}" if stage < len(stages) else "",
            key="pipeline_jump",
            icon=":material/my_location:",
            help="Scrolls the graph to where a stage begins.",
            on_click=_jump,
            args=(split, state, graph),
        )
        with st.popover("", icon=":material/settings:", key="pipeline_more", help="Recompute, dropout, BatchNorm"):
            _more(split)


def _take_stages(split: State, state: State, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """As many stages as a person asked for."""
    _cut(split, state, graph, (int(st.session_state["pipeline_stages"]), _usual_rule(profile)), profile)
    taken("pipeline_stages", len(pipeline_state.stages_of(split, graph)))


def _balance(split: State, state: State, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """As many stages as there are, cut by the rule that a person chose."""
    rule: CutRule | None = st.session_state.get("pipeline_balance")
    pipeline_state.absorb(split, state, graph, until_press=True)
    if rule is not None:
        _cut(split, state, graph, (len(pipeline_state.stages_of(split, graph)), rule), profile)


def _jump(split: State, state: State, graph: ModelGraph) -> None:
    """Unfolds and scrolls to the first block of the stage that was chosen."""
    pipeline_state.absorb(split, state, graph)
    stages = pipeline_state.stages_of(split, graph)
    stage = st.session_state.get("pipeline_jump")
    if stage is None or stage >= len(stages):
        return
    fqn, marks = stages[stage][0], pipeline_state.marks_of(split, graph)
    marks["open"] = list(dict.fromkeys([*marks["open"], *ancestors(graph, fqn)]))
    split["jump"] = [fqn, split["jump"][1] + 1 if split["jump"] else 1]


def plan_of(split: State, stages: tuple[tuple[str, ...], ...]) -> PipelinePlan:
    """The plan of these stages under the chosen schedule."""
    return PipelinePlan(
        stages=stages,
        n_microbatches=split["n_microbatches"],
        schedule=split["schedule"],
        n_ranks=default_ranks(split["schedule"], len(stages)),
        checkpoint=split["checkpoint"],
        keyed_rng=split["keyed_rng"],
        deferred_batch_norm=split["deferred_batch_norm"],
    )


def _more(split: State) -> None:
    split["checkpoint"] = st.selectbox(
        "Recompute in which microbatches",
        get_args(CheckpointMode),
        key=show("pipeline_checkpoint", split["checkpoint"]),
        help=words.CHECKPOINT,
    )
    split["keyed_rng"] = st.toggle(
        "Dropout independent of the split", key=show("pipeline_keyed", split["keyed_rng"]), help=words.KEYED
    )
    split["deferred_batch_norm"] = st.toggle(
        "BatchNorm statistics once per batch",
        key=show("pipeline_deferred", split["deferred_batch_norm"]),
        help=words.DEFERRED,
    )


def _first_cut(split: State, state: State, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """A model nobody has cut yet has two even stages, evened out again once its blocks are priced; no step to undo."""
    if not split["uncut"]:
        return
    if len(atoms(graph)) > 1:
        done = split["undo"]
        _cut(split, state, graph, (2, _usual_rule(profile)), profile)
        split["undo"] = done
    split["uncut"] = profile is None


def _usual_rule(profile: PipelineProfile | None) -> CutRule:
    """Even time where times are known."""
    return "by-parameters" if profile is None else "by-time"


def _cut(
    split: State, state: State, graph: ModelGraph, wanted: tuple[int, CutRule], profile: PipelineProfile | None
) -> None:
    n_stages, rule = wanted
    try:
        pressure = None
        if rule == "by-memory":
            pressure = (states.spec_of(state).policy, rows_of(plan_of(split, ((),) * n_stages)))
        stages = stages_by(rule, graph, n_stages, profile=profile, pressure=pressure)
    except ExplorerError as error:
        pipeline_state.fail(split, error)
        return
    pipeline_state.cut_at(split, state, graph, stages)


def engine_picker(split: State) -> None:
    """Which executor plays the action list. All of them must give the same gradients."""
    picked = st.segmented_control(
        "Run it as",
        list(words.ENGINES),
        format_func=words.ENGINES.__getitem__,
        key=show("pipeline_engine", split["engine"]),
        label_visibility="collapsed",
        help=words.ENGINE_HELP,
    )
    split["engine"] = picked or split["engine"]
