"""The plan: how many stages and where they are cut, how many microbatches, which schedule drives them."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.cuts import CutRule, stages_by
from explorer.plan.schedules import SCHEDULES, default_ranks, rows_of
from explorer.record.graph import ModelGraph
from explorer.record.pipeline import Forecast, PipelineProfile, PipelineRun
from explorer.record.plan import CheckpointMode, PipelinePlan
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.ui import block_graph, pipeline_state
from explorer.ui.block_graph import Label, Paint
from explorer.ui.bound import show
from explorer.ui.state import State
from explorer.view.colours import RECOMPUTE, STAGE_COLOURS
from explorer.view.geometry import layout
from explorer.view.nesting import nest
from explorer.view.units import mib

HEIGHT = 380
BALANCE: dict[CutRule, str] = {"by-parameters": "even parameters", "by-time": "even time", "by-memory": "even memory"}
ENGINES = {
    "inproc": "one process",
    "replay": "each rank alone",
    "procs": "one process a rank",
}
ENGINE_HELP = (
    "**one process** plays every action in turn on this device. **each rank alone** replays a rank with recorded "
    "boundary tensors, so its memory and times are those of a machine of its own. **one process a rank** is "
    "torch.distributed.pipelining for real (gloo on CPU, NCCL on CUDA). For several machines take the torchrun files "
    "from the tab Files."
)
CHECKPOINT_HELP = (
    "Which microbatches recompute the policy's blocks. **except_last**: the last microbatch is kept, because its "
    "backward starts at once (torchgpipe's words and meaning)."
)
KEYED_HELP = (
    "Seeds dropout by (seed, block, microbatch), so that every split draws the same masks. Without it the masks depend "
    "on the split, and so do the gradients."
)


def plan_panel(split: State, graph: ModelGraph, spec: RunSpec, profile: PipelineProfile | None) -> PipelinePlan | None:
    """The controls; returns the plan as it is drawn now, None while there is a single stage."""
    pipeline_state.absorb(split, graph)
    _first_cut(split, graph)
    stages = pipeline_state.stages_of(split, graph)
    one, two, three = st.columns(3, vertical_alignment="bottom", gap="small")
    with one:
        n_stages = int(st.number_input("Stages", 1, max(len(graph.spine), 1), key=show("pipeline_stages", len(stages))))
    with two:
        split["n_microbatches"] = int(
            st.number_input("Microbatches", 1, 256, key=show("pipeline_microbatches", split["n_microbatches"]))
        )
    with three:
        split["schedule"] = st.selectbox("Schedule", SCHEDULES, key=show("pipeline_schedule", split["schedule"]))
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_tools"):
        rule = st.menu_button(
            "Balance", list(BALANCE), format_func=BALANCE.__getitem__, key="pipeline_balance", icon=":material/balance:"
        )
        with st.popover("More", icon=":material/settings:", key="pipeline_more"):
            _more(split)
    if rule is not None or n_stages != len(stages):
        _cut(split, graph, (n_stages, rule or "by-parameters"), spec, profile)
        st.rerun()
    return plan_of(split, stages)


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
        help=CHECKPOINT_HELP,
    )
    split["keyed_rng"] = st.toggle(
        "Dropout independent of the split", key=show("pipeline_keyed", split["keyed_rng"]), help=KEYED_HELP
    )
    split["deferred_batch_norm"] = st.toggle(
        "BatchNorm statistics once per batch",
        key=show("pipeline_deferred", split["deferred_batch_norm"]),
        help="Running statistics move once per batch instead of once per microbatch.",
    )


def _first_cut(split: State, graph: ModelGraph) -> None:
    """A model nobody has cut yet starts with two stages of even parameters."""
    marks = pipeline_state.marks_of(split, graph)
    if not marks["cuts"] and not marks["revision"] and not marks["seq"]:
        _cut(split, graph, (2, "by-parameters"), None, None)


def _cut(
    split: State,
    graph: ModelGraph,
    wanted: tuple[int, CutRule],
    spec: RunSpec | None,
    profile: PipelineProfile | None,
) -> None:
    n_stages, rule = wanted
    try:
        pressure = None
        if rule == "by-memory" and spec is not None:
            pressure = (spec.policy, rows_of(plan_of(split, ((),) * n_stages)))
        stages = stages_by(rule, graph, n_stages, profile=profile, pressure=pressure)
    except ExplorerError as error:
        split["failure"] = pipeline_state.failure_of(error)
        return
    pipeline_state.cut_at(split, graph, stages)


def cut_graph(split: State, graph: ModelGraph, policy: Policy) -> None:
    """The block graph with its cut lines; a click or Enter on a line cuts there, colours are stages."""
    marks = pipeline_state.marks_of(split, graph)
    marks["on"] = list(policy.blocks)
    stage_of = {fqn: stage for stage, blocks in enumerate(pipeline_state.stages_of(split, graph)) for fqn in blocks}
    labels = {
        node.id: Label(
            bytes=mib(graph.by_fqn[node.id].parameter_bytes) if node.id in graph.by_fqn else "",
            title="parameters of this block",
            stage=_stage(node.id, node.members, stage_of),
        )
        for node in nest(graph).values()
        if node.id
    }
    block_graph.block_graph(
        layout(graph, marks["open"], cuts=True),
        marks,
        Paint(labels=labels, recompute_colour=RECOMPUTE, stage_colours=STAGE_COLOURS, height=HEIGHT),
        key=pipeline_state.WIDGET,
        on_change=lambda: pipeline_state.absorb(split, graph),
    )


def _stage(id: str, members: tuple[str, ...], stage_of: dict[str, int]) -> int | None:
    """Of a block, or of the unit of the spine it lies in; None where a run spreads over several."""
    if members:
        stages = {stage_of.get(member) for member in members}
        return stages.pop() if len(stages) == 1 else None
    while id:
        if id in stage_of:
            return stage_of[id]
        id = id.rpartition(".")[0]
    return None


def engine_picker(split: State) -> None:
    """Which executor plays the action list. All of them must give the same gradients."""
    picked = st.segmented_control(
        "Run it as",
        list(ENGINES),
        format_func=ENGINES.__getitem__,
        key=show("pipeline_engine", split["engine"]),
        label_visibility="collapsed",
        help=ENGINE_HELP,
    )
    split["engine"] = picked or split["engine"]


def strip(
    run: PipelineRun | None, forecast: Forecast | None, plan: PipelinePlan | None, *, before: PipelineRun | None
) -> None:
    """Five figures: measured where this very plan ran, predicted otherwise; an older run stands below, dimmed."""
    shown = run.composed if run is not None and run.composed is not None else forecast
    memory = run.memory if run is not None and run.memory else (forecast.memory if forecast else ())
    peak = max(memory, key=lambda one: one.peak_bytes or 0, default=None)
    old = f":gray[an earlier plan took {before.composed.makespan_ms:.1f} ms]" if before and before.composed else ""
    cells = (
        ("Step", f"{shown.makespan_ms:.1f} ms" if shown else "not measured", shown.origin if shown else "", STEP_HELP),
        ("Bubble", f"{shown.bubble_fraction:.1%}" if shown else "not measured", shown.origin if shown else "", BUBBLE),
        (
            f"Peak of rank {peak.rank}" if peak else "Highest peak",
            mib(peak.peak_bytes) if peak else "not measured",
            f"{peak.origin}{', at ' + peak.peak_action if peak.peak_action else ''}" if peak else "",
            PEAK_HELP,
        ),
        (
            "Gradients",
            f"{run.n_splitting_equal} of {len(run.gradients)}" if run and run.gradients else "not compared",
            "bitwise equal to unsplit" if run and run.gradients else "press Run",
            TRUTH_HELP,
        ),
        (
            "Plan",
            f"{len(plan.stages)} stages" if plan else "none",
            f"{plan.n_microbatches} microbatches, {plan.schedule}" if plan else "",
            "Stages are coloured in the graph. Click a line between two blocks to cut there.",
        ),
    )
    for column, (label, value, origin, words) in zip(st.columns(len(cells), gap="small"), cells):
        with column, st.container(gap=None):
            st.metric(label, value, help=words)
            st.caption(old if old and label == "Step" else origin or "\N{NO-BREAK SPACE}")


STEP_HELP = "Time from the first to the last action, every rank on a machine of its own, without the optimizer."
BUBBLE = "Share of the ranks' time in which they wait for each other, averaged over ranks."
PEAK_HELP = "Most bytes that the fullest rank holds at once: parameters, receive buffers, activations, gradients."
TRUTH_HELP = "Gradients that splitting left equal in every bit, against the unsplit model on the same microbatches."
