"""Controls of the plan: stages and their cuts, microbatches, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import streamlit as st

from explorer.plan.pipeline.cuts import CutRule, atoms, stages_by, usual_rule
from explorer.plan.pipeline.schedules import fitting, rows_of
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.run import CheckpointMode, PipelinePlan
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.address import MOST_MICROBATCHES
from explorer.ui.pipeline.schedule_panel import n_ranks_of, schedule_file, schedule_picker
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import page_job
from explorer.ui.session.bound import Bound, bound
from explorer.ui.shared.strip import Cell
from explorer.view.graph.nesting import ancestors
from explorer.view.pipeline.headline import Figure
from explorer.view.text import explore as glossary
from explorer.view.text import pipeline as words

STAGES_WIDTH, MICROBATCHES_WIDTH = 120, 130
"""The names of schedules need the rest of the row."""


def cell(figure: Figure) -> Cell:
    """A figure of the headline as shown on the page."""
    origin = glossary.ORIGIN.get(figure.origin, "")
    return Cell(
        label=figure.label,
        value=figure.value,
        delta=figure.delta,
        help=f"{figure.help} {origin}".rstrip(),
        below=figure.origin,
    )


def plan_panel(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> PipelinePlan:
    """Draws the controls; returns the drawn plan."""
    _first_cut(split, graph, profile)
    stages = pipeline_state.stages_of(split, graph)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_plan"):
        wanted = bound("pipeline_stages", len(stages), lambda n: _take_stages(split, graph, profile, n))
        most = max(len(atoms(graph)), len(stages), 1)
        st.number_input("Stages", 1, most, wanted.value, help=words.STAGE, width=STAGES_WIDTH, **wanted.wired)
        number = _bound(split, "n_microbatches", "pipeline_microbatches")
        st.number_input(
            "Microbatches", 1, MOST_MICROBATCHES, number.value, help=words.MICROBATCH, width=MICROBATCHES_WIDTH,
            **number.wired,
        )  # fmt: skip
        schedule_picker(split, len(stages))
    _tools(split, graph, profile)
    return plan_of(split, stages)


def _tools(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Draws balance, undo, redo, go to a stage, and rarely changed options."""
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_tools"):
        st.menu_button(
            "Balance",
            list(words.BALANCE),
            format_func=words.BALANCE.__getitem__,
            key="pipeline_balance",
            icon=":material/balance:",
            help=words.BALANCE_HELP,
            on_click=lambda: _balance(split, graph, profile),
        )
        history = split.history
        for name, help, steps in (
            ("undo", "Take back the last cut or toggle", history.past),
            ("redo", "Make it again", history.future),
        ):
            st.button(
                name.capitalize(),
                icon=f":material/{name}:",
                key=f"pipeline_{name}",
                help=help,
                disabled=not steps,
                on_click=pipeline_state.undo,
                args=(split, graph),
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
            args=(split, graph),
        )
        with st.popover("More", key="pipeline_more", help="Recompute, dropout, BatchNorm, an own schedule"):
            _more(split)
            schedule_file(split, graph)


def _bound(split: PipelineState, name: str, key: str) -> Bound:
    return bound(key, getattr(split.choices, name), lambda value: pipeline_state.choose(split, name, value))


def _choice(split: PipelineState, name: str, label: str, offered: tuple[Sequence[Any], str]) -> None:
    """Draws a choice of values; `offered`: the values and their help text."""
    options, help = offered
    now = _bound(split, name, f"pipeline_{name}")
    st.selectbox(label, options, options.index(now.value), help=help, **now.wired)


def _switch(split: PipelineState, name: str, label: str, help: str) -> None:
    now = _bound(split, name, f"pipeline_{name}")
    st.toggle(label, now.value, help=help, **now.wired)


def _take_stages(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None, n_stages: int) -> None:
    """Cuts the model into the number of stages that a person requests."""
    _cut(split, graph, (int(n_stages), usual_rule(profile)), profile)


def _balance(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Cuts the model into the current number of stages, by the rule that a person chose."""
    rule: CutRule | None = st.session_state.get("pipeline_balance")
    pipeline_state.absorb(split, graph, until_press=True)
    if rule is not None:
        _cut(split, graph, (len(pipeline_state.stages_of(split, graph)), rule), profile)


def _jump(split: PipelineState, graph: ModelGraph) -> None:
    """Unfolds and scrolls to the first block of the chosen stage."""
    pipeline_state.absorb(split, graph)
    stages = pipeline_state.stages_of(split, graph)
    stage = st.session_state.get("pipeline_jump")
    if stage is None or stage >= len(stages):
        return
    fqn, marks = stages[stage][0], pipeline_state.marks_of(split, graph)
    marks.open = list(dict.fromkeys([*marks.open, *ancestors(graph, fqn)]))
    split.jump = (fqn, split.jump[1] + 1 if split.jump else 1)


def plan_of(split: PipelineState, stages: tuple[tuple[str, ...], ...]) -> PipelinePlan:
    """The plan of these stages under the chosen schedule."""
    choices = split.choices
    return PipelinePlan(
        stages=stages,
        n_microbatches=choices.n_microbatches,
        schedule=choices.schedule,
        n_ranks=n_ranks_of(choices, len(stages)),
        checkpoint=choices.checkpoint,
        keyed_rng=choices.keyed_rng,
        deferred_batch_norm=choices.deferred_batch_norm,
        actions=choices.actions,
    )


def _more(split: PipelineState) -> None:
    modes = (get_args(CheckpointMode), words.CHECKPOINT)
    _choice(split, "checkpoint", "Recompute in which microbatches", modes)
    _switch(split, "keyed_rng", "Dropout independent of the split", words.KEYED)
    _switch(split, "deferred_batch_norm", "BatchNorm statistics once per batch", words.DEFERRED)


def _first_cut(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Cuts a new model into two even stages, and again when its blocks are priced. Neither is a step of undo."""
    if not split.uncut:
        return
    pipeline_state.choose(split, "n_microbatches", fitting(split.choices.n_microbatches, graph))
    if len(atoms(graph)) > 1:
        done = split.history.past
        _cut(split, graph, (2, usual_rule(profile)), profile)
        split.history.past = done
    split.uncut = profile is None


def _cut(split: PipelineState, graph: ModelGraph, wanted: tuple[int, CutRule], profile: PipelineProfile | None) -> None:
    n_stages, rule = wanted
    with page_job.refusing(split.job):
        pressure = None
        if rule == "by-memory":
            pressure = (split.draft.spec.policy, rows_of(plan_of(split, ((),) * n_stages)))
        stages = stages_by(rule, graph, n_stages, profile=profile, pressure=pressure)
        pipeline_state.cut_at(split, graph, stages)


def engine_picker(split: PipelineState) -> None:
    """Which executor plays the action list. All of them must give the same gradients."""
    now = bound("pipeline_engine", split.engine, lambda engine: setattr(split, "engine", engine or split.engine))
    st.segmented_control(
        "Run it as",
        list(words.ENGINES),
        format_func=words.ENGINES.__getitem__,
        default=now.value,
        label_visibility="collapsed",
        help=words.ENGINE_HELP,
        **now.wired,
    )
