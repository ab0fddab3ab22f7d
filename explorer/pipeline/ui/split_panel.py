"""Controls of the split: stages and their cuts, microbatches, schedule, a cap for every rank, and the block graph.

The graph has cut lines, stage colours, and the same recompute marks as on Explore.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import streamlit as st
from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.jobs import FindJointPlan
from explorer.pipeline.plan.cuts import CutRule, atoms, stages_by, usual_rule
from explorer.pipeline.plan.schedules import SCHEDULES, default_ranks, fitting, rank_counts, rows_of
from explorer.pipeline.record.step import BlockCost, CapWish, JointPlan, PipelineProfile, PipelineRun
from explorer.pipeline.ui import state as pipeline_state
from explorer.pipeline.ui.equal_ranks import stages_for
from explorer.pipeline.ui.state import MOST_MICROBATCHES, PipelineState
from explorer.pipeline.view import text as words
from explorer.plan.sizes import parse_bytes
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import OWN_SCHEDULE, CheckpointMode, PipelinePlan
from explorer.ui import components
from explorer.ui.components import Cell
from explorer.ui.session import page_job, window
from explorer.ui.session.repository import runs
from explorer.ui.session.values import Bound, bound, select, whole
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import escape, horizontal
from explorer.view.drawing.units import mib
from explorer.view.graph.browser import Paint
from explorer.view.graph.geometry import Layout, layout
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import Node, nest
from explorer.view.text import explore as glossary
from explorer.view.text.explore import Headline

STAGES_WIDTH, MICROBATCHES_WIDTH, RANKS_WIDTH, CAP_WIDTH = 120, 130, 85, 170
"""The names of schedules need the rest of the row."""
HEIGHT = 290
"""Pixels of the graph in a window of the usual height."""


def cell(figure: Headline) -> Cell:
    """A figure of the headline as shown on the page."""
    return Cell(
        label=figure.label,
        value=figure.value,
        delta=figure.delta,
        help=" ".join([figure.tooltip, *(glossary.ORIGIN[origin] for origin in figure.origin)]),
        below=", ".join(figure.origin),
    )


def split_panel(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> PipelinePlan:
    """Draws the controls; returns the drawn plan."""
    with whole():
        _first_cut(split, graph, profile)
    stages = pipeline_state.stages_of(split, graph)
    with horizontal("pipeline_plan", align="bottom"):
        field = bound("pipeline_stages", len(stages), lambda n: take_stages(split, graph, profile, n))
        most = max(len(atoms(graph)), len(stages), 1)
        st.number_input("Stages", 1, most, field.value, help=words.STAGE, width=STAGES_WIDTH, **field.wired)
        number = _bound(split, "n_microbatches", "pipeline_microbatches")
        st.number_input(
            "Microbatches", 1, MOST_MICROBATCHES, number.value, help=words.MICROBATCH, width=MICROBATCHES_WIDTH,
            **number.wired,
        )  # fmt: skip
        schedule_picker(split, graph, profile, len(stages))
    _tools(split, graph, profile)
    return plan_of(split, stages)


def _tools(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Draws balance, undo, redo, and rarely changed options."""
    with horizontal("pipeline_tools", align="bottom"):
        st.menu_button(
            "Balance",
            list(words.BALANCE),
            format_func=words.BALANCE.__getitem__,
            key="pipeline_balance",
            icon=":material/balance:",
            help=words.BALANCE_HELP,
            on_click=lambda: _balance(split, graph, profile),
        )
        drafts.undo_buttons(
            split.history,
            partial(pipeline_state.undo, split, graph),
            ("Take back the last cut or toggle (Ctrl+Z)", "Make it again (Ctrl+Y)"),
            prefix="pipeline_",
        )
        with st.popover("More", key="pipeline_more", help="Recompute, dropout, BatchNorm"):
            _more(split)


def _bound(split: PipelineState, name: str, key: str) -> Bound:
    return bound(key, getattr(split.choices, name), lambda value: pipeline_state.choose(split, name, value))


def _choice(split: PipelineState, name: str, label: str, offered: tuple[Sequence[object], str]) -> None:
    """Draws a choice of values; `offered`: the values and their help text."""
    options, help = offered
    select(label, options, _bound(split, name, f"pipeline_{name}"), help=help)


def _switch(split: PipelineState, name: str, label: str, help: str) -> None:
    field = _bound(split, name, f"pipeline_{name}")
    st.toggle(label, field.value, help=help, **field.wired)


def take_stages(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None, n_stages: int) -> None:
    """Cuts the model into the number of stages that a person requests."""
    _cut(split, graph, (int(n_stages), usual_rule(profile)), profile)


def _balance(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Cuts the model into the current number of stages, by the rule that a person chose."""
    rule: CutRule | None = st.session_state.get("pipeline_balance")
    pipeline_state.absorb(split, graph, until_press=True)
    if rule is not None:
        _cut(split, graph, (len(pipeline_state.stages_of(split, graph)), rule), profile)


def plan_of(split: PipelineState, stages: tuple[tuple[str, ...], ...]) -> PipelinePlan:
    """The plan of these stages under the chosen schedule."""
    return replace(split.choices, stages=stages, n_ranks=n_ranks_of(split.choices, len(stages)))


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
        past = split.history.past
        _cut(split, graph, (2, usual_rule(profile)), profile)
        split.history.past = past
    split.uncut = profile is None


def _cut(
    split: PipelineState, graph: ModelGraph, request: tuple[int, CutRule], profile: PipelineProfile | None
) -> None:
    n_stages, rule = request
    with page_job.refusing(split.job):
        pressure = None
        if rule == "by-memory":
            pressure = (split.draft.spec.policy, rows_of(plan_of(split, ((),) * n_stages)))
        stages = stages_by(rule, graph, n_stages, profile=profile, pressure=pressure)
        pipeline_state.cut_at(split, graph, stages)


def n_ranks_of(choices: PipelinePlan, n_stages: int) -> int:
    """Number of ranks: the chosen number if the schedule allows it, else the schedule's default."""
    if choices.actions:
        return len(choices.actions)
    chosen = choices.n_ranks
    if chosen is not None and chosen in rank_counts(choices.schedule, n_stages):
        return chosen
    return default_ranks(choices.schedule, n_stages)


def schedule_picker(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None, n_stages: int) -> None:
    """The schedule's name, and how many ranks share the stages. Another schedule keeps the ranks where it can."""
    drawn = OWN_SCHEDULE if split.choices.actions else split.choices.schedule  # a stored run may bring its own
    names = list(dict.fromkeys([*SCHEDULES, drawn]))
    n_ranks = n_ranks_of(split.choices, n_stages)

    def choose(name: str) -> None:
        _choose_schedule(split, name)
        if n_ranks in rank_counts(name, n_stages):
            pipeline_state.choose(split, "n_ranks", n_ranks if n_ranks != default_ranks(name, n_stages) else None)
        elif n_ranks > 1 and stages_for(name, n_ranks) <= len(atoms(graph)):
            pipeline_state.choose(split, "n_ranks", None)
            take_stages(split, graph, profile, stages_for(name, n_ranks))

    field = bound("pipeline_schedule", drawn, choose)
    select("Schedule", names, field, help=words.SCHEDULE)
    allowed = () if split.choices.actions else rank_counts(split.choices.schedule, n_stages)
    offered = sorted({*allowed, n_ranks})
    number = bound("pipeline_n_ranks", n_ranks, lambda n: pipeline_state.choose(split, "n_ranks", n))
    select("Ranks", offered, number, disabled=len(offered) < 2, help=words.RANKS, width=RANKS_WIDTH)


def _choose_schedule(split: PipelineState, name: str) -> None:
    pipeline_state.choose(split, "actions", ())
    pipeline_state.choose(split, "schedule", name)


def cap_panel(
    split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None, run: PipelineRun | None
) -> None:
    """Draws the field and its button, the outcome of the last press, and whether `run` kept the cap."""
    field = bound("pipeline_cap", split.cap, lambda text: setattr(split, "cap", text))
    with horizontal("pipeline_cap_row", align="bottom"):
        st.text_input(
            "Memory limit of a rank",
            field.value,
            placeholder="200MiB",
            help=words.CAP,
            width=CAP_WIDTH,
            **field.wired,
        )
        st.button(
            "Plan within the limit",
            icon=":material/auto_awesome:",
            key="pipeline_plan_button",
            help=words.CAP,
            disabled=profile is None or split.job.id is not None,
            on_click=_request_plan,
            args=(split, graph, profile),
        )
    if split.planned is not None and _is_drawn(split, graph, split.planned):
        st.caption(escape(words.plan_sentence(split.planned)))
        if run is not None and (outcome := words.cap_outcome(run, split.planned)):
            colour = "green" if words.within_cap(run, split.planned) else "red"
            st.caption(f":{colour}[**{escape(outcome.replace('cap', 'Cap', 1))}.**]")


def _request_plan(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Submits the search for a plan below the cap to the worker, as many cuts are simulated."""
    if profile is None:
        return
    pipeline_state.absorb(split, graph, until_press=True)
    split.planned, split.job.failure = None, None
    with page_job.refusing(split.job):
        wish = CapWish(asked=plan_of(split, pipeline_state.stages_of(split, graph)), cap_bytes=parse_bytes(split.cap))
        page_job.start(split.job, FindJointPlan(profile=profile, graph=graph, wish=wish))


def take_plan(split: PipelineState, request: FindJointPlan, joint: JointPlan) -> None:
    """Takes over the joint plan, unless the drawn plan changed meanwhile. Cut and policy are one step of undo each."""
    graph, drawn = request.graph, runs().graph(split.draft.spec)
    if drawn != graph or plan_of(split, pipeline_state.stages_of(split, graph)) != request.wish.asked:
        page_job.refuse(split.job, InvalidPlan("The plan was changed while another was sought.", hint="Plan again."))
        return
    pipeline_state.choose(split, "n_microbatches", joint.plan.n_microbatches)
    pipeline_state.cut_at(split, graph, joint.plan.stages)
    pipeline_state.recompute(split, graph, drafts.with_units(split.draft.spec.policy, joint.policy.units))
    split.planned = joint


def _is_drawn(split: PipelineState, graph: ModelGraph, joint: JointPlan) -> bool:
    """Whether nothing was chosen since."""
    drawn = plan_of(split, pipeline_state.stages_of(split, graph))
    return drawn == joint.plan and set(split.draft.spec.policy.blocks) == set(joint.policy.blocks)


def cut_graph(split: PipelineState, graph: ModelGraph, plan: PipelinePlan, profile: PipelineProfile | None) -> None:
    """A click or Enter on a line cuts there; a click or Space on a block recomputes it."""
    marks = pipeline_state.marks_of(split, graph)
    policy, visitor = split.draft.spec.policy, window.laid_out_for()
    components.block_graph(
        drawing(graph, marks.open, plan.n_microbatches),
        marks,
        Paint(
            labels=labels(graph, policy, plan, profile),
            segments=tuple(unit.blocks for unit in policy.units if len(unit.blocks) > 1),
            height=HEIGHT + visitor.height - window.USUAL_HEIGHT,
            window=visitor,
        ),
        {"on": policy.blocks},
        key=pipeline_state.WIDGET,
    )


def drawing(graph: ModelGraph, opened: list[str], n_microbatches: int) -> Layout:
    """The graph with its cut lines; bytes on a line are the bytes of one microbatch."""
    drawn = layout(graph, opened, cuts=True)
    cuts = tuple(replace(cut, note=f"cut: {mib(cut.n_bytes / n_microbatches)} a microbatch") for cut in drawn.cuts)
    return replace(drawn, cuts=cuts)


def labels(graph: ModelGraph, policy: Policy, plan: PipelinePlan, profile: PipelineProfile | None) -> dict[str, Label]:
    """Labels of the blocks: parameters, stage, and cost of the block alone."""
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    costs = {cost.blocks[0]: cost for cost in profile.blocks if len(cost.blocks) == 1} if profile else {}
    on = set(policy.blocks)
    by_fqn = {}
    for node in nest(graph).values():
        if not node.id:
            continue
        stage = _stage(node, stage_of)
        price = _price(costs.get(node.id), recomputed=node.id in on)
        is_in_chain = node.id in stage_of or node.members
        by_fqn[node.id] = Label(
            bytes=f"params {mib(graph.by_fqn[node.id].parameter_bytes)}" if node.id in graph.by_fqn else "",
            note=" · ".join(filter(None, [price, f"stage {stage}" if is_in_chain and stage is not None else ""])),
            title=_title(node, stage, costs.get(node.id)),
            stage=stage,
        )
    return by_fqn


def _price(cost: BlockCost | None, *, recomputed: bool) -> str:
    if cost is None:
        return ""
    action = cost.recomputed if recomputed else cost.kept
    return f"{action.forward_ms + action.backward_ms:.1f} ms"


def _title(node: Node, stage: int | None, cost: BlockCost | None) -> str:
    lines = [f"{node.id.lstrip('×')} ({node.kind})"]
    if stage is not None:
        lines.append(f"on stage {stage}")
    if cost is not None:
        for words, action in (("kept", cost.kept), ("recomputed", cost.recomputed)):
            lines.append(
                f"one microbatch, {words}: forward {action.forward_ms:.2f} ms, backward {action.backward_ms:.2f} ms, "
                f"saves {mib(action.saved_bytes)} (measured)"
            )
    return "\n".join(lines)


def _stage(node: Node, stage_of: dict[str, int]) -> int | None:
    """Stage of a block or of its unit in the chain; None if a run spreads over several stages."""
    if node.members:
        stages = {stage_of.get(member) for member in node.members}
        return stages.pop() if len(stages) == 1 else None
    id = node.id
    while id:
        if id in stage_of:
            return stage_of[id]
        id = id.rpartition(".")[0]
    return None
