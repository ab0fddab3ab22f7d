"""The tabs beside the graph: memory, budget, cost, gradients, more. Hidden tabs are not computed.

Cost: operations of each block, step times, and every block as a row. Gradients: the verdict, the worst tensor, the
likely cause, and what else the step changed. Autograd: the graph of one block, kept and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import streamlit as st

from explorer.jobs.protocol import DrawAutograd
from explorer.plan.hazards.hazards import hazards
from explorer.plan.why.checkpointing import checkpointing_rows, sides
from explorer.record.comparison import Comparison, Verdict
from explorer.record.graph import AutogradPicture, AutogradPictures, ModelGraph
from explorer.record.measurement import Measurement
from explorer.ui.explore import work
from explorer.ui.explore.fitting import VIEW, fit_panel
from explorer.ui.explore.front import front_panel
from explorer.ui.explore.memory import memory_panel
from explorer.ui.explore.view import View
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import page_job, window
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.charts import draw, numbers
from explorer.ui.shared.download import Offer, download
from explorer.ui.shared.elements import failure_panel, fold, frame, hazards_panel, small_text
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time, time_answer, uncounted_in_words
from explorer.view.compare.gradients import (
    all_equal,
    carried_table,
    diff_table,
    gradient_chart,
    mask_table,
    rng_table,
    scope_sentence,
    seal,
    state_change_table,
    verdict_sentence,
)
from explorer.view.compare.headline import errors
from explorer.view.drawing.units import count, flops, milliseconds
from explorer.view.graph.browser import caption, difference, themed
from explorer.view.graph.nesting import RUN
from explorer.view.memory.blocks import operators_chart, saved_bytes_chart
from explorer.view.text import explore as glossary
from explorer.view.text.runs import what_failed

TABS = ["Memory", "Budget", "Cost", "Gradients", "Autograd"]


def results(state: ExploreState, view: View) -> Callable[[], None]:
    """Draws the tabs, and above the timelines. The function that is returned draws the measured results of the last
    comparison, else of the baseline alone: what comes last takes a browser longest."""
    graph, comparison, baseline = view.graph, view.comparison, view.charted
    tabs = st.tabs(TABS, key="tabs", on_change="rerun")
    if baseline is None:
        with tabs[0]:
            _waiting(state, graph)
        return lambda: None
    block = drafts.marks_of(state.draft, graph).selected.removeprefix(RUN) if graph is not None else ""
    why_not = drafts.why_not_run(state.draft)
    memory, budget, cost, gradients, autograd = tabs
    timelines = None
    if memory.open:
        with memory:
            timelines = _memory(state, view, block)

    def rest() -> None:
        if timelines is not None:
            with memory:
                timelines()
        if budget.open and graph is not None:
            with budget:
                _budget(state, view, graph)
        if cost.open:
            with cost:
                if comparison is None:
                    st.caption(_not_compared(graph, glossary.NOT_PLAYED if state.draft.predict else why_not))
                elif not comparison.comparable:
                    st.text(f"The {what_failed(comparison)}: what a whole step costs is not known.")
                cost_panel(comparison if comparison is not None and comparison.comparable else baseline, block=block)
        if gradients.open:
            with gradients:
                _gradients(state, graph, comparison)
        if autograd.open and graph is not None:
            with autograd:
                st.markdown("**What autograd records**")
                if why_not:
                    st.caption(why_not)
                    return
                autograd_panel(state, graph, work.result(state, "pictures"), block=block)

    return rest


def _budget(state: ExploreState, view: View, graph: ModelGraph) -> None:
    choice = st.segmented_control(
        "View", ["Policies", VIEW], default="Policies", key="budget_view", required=True, label_visibility="collapsed"
    )
    if choice == VIEW:
        fit_panel(state)
    else:
        front_panel(state, view, graph)


def _waiting(state: ExploreState, graph: ModelGraph | None) -> None:
    """Says what the place of the timeline waits for."""
    if state.job.id is None:
        press = " Press **Run** at the bottom." if graph is not None else ""  # a model that was not read cannot run
        st.caption(glossary.NOT_PLAYED if state.draft.predict else f"Nothing was measured yet.{press}")
        return
    st.caption(glossary.GRAPH_FOLLOWS if graph is None else glossary.STEP_FOLLOWS)
    st.skeleton(height=320)


def _memory(state: ExploreState, view: View, block: str) -> Callable[[], None]:
    for name, run in (("baseline", view.charted), ("candidate", view.charted_candidate)):
        if run is not None and run.failure is not None:
            failure_panel(run.failure, key=name)
    return memory_panel(state, view, block=block)


def _not_compared(graph: ModelGraph | None, why_not: str) -> str:
    if graph is not None and len(graph.blocks) == 1:
        return glossary.NO_BLOCKS
    return why_not or glossary.EMPTY


def _gradients(state: ExploreState, graph: ModelGraph | None, comparison: Comparison | None) -> None:
    spec = state.draft.spec
    if graph is not None:
        if known_hazards := hazards(graph, spec.policy, spec.plan, spec):
            with fold(
                f"Known before any run: {count(len(known_hazards), 'hazard')}",
                icon=":material/warning:",
                key="hazards_with_errors" if errors(known_hazards) else "hazards",
                expanded=bool(errors(known_hazards)),
            ):
                hazards_panel(known_hazards)
        else:
            hazards_panel(())
    if comparison is None or comparison.is_predicted:
        st.caption(_not_compared(graph, drafts.why_not_run(state.draft)))
        return
    if comparison.candidate.spec != spec:
        small_text(glossary.STALE)
    if comparison.failure is not None:
        failure_panel(comparison.failure, key="comparison")
    if comparison.gradients or not comparison.comparable:
        gradients_panel(comparison)
    else:
        st.caption(glossary.GRADIENTS_FOLLOW if state.job.id is not None else glossary.EMPTY)


PARTS = ("step", "forward", "backward", "optimizer")
OPERATIONS, TIME, STEP, SAVED = "FLOPs by block", "Time by block", "Step time", "Saved bytes"
"""Views of the cost; all but the time of the step are by block."""


def cost_panel(run: Comparison | Measurement, *, block: str) -> None:
    """What the step costs, a chart of its blocks by the chosen quantity, and every block as a row of a table."""
    view = SAVED
    if isinstance(run, Comparison):
        _totals(run)
        timed = not run.is_predicted
        view = st.segmented_control(
            "View",
            [OPERATIONS, TIME, STEP, SAVED] if timed else [OPERATIONS, SAVED],
            default=OPERATIONS,
            key="cost_view" if timed else "predicted_cost_view",
            required=True,
            label_visibility="collapsed",
        )
    if isinstance(run, Comparison) and view != SAVED:
        chart = {OPERATIONS: recompute_cost, TIME: recompute_time, STEP: step_time}[view or OPERATIONS]
        draw(chart(run), key=f"cost_{chart.__name__}")
    else:
        draw(saved_bytes_chart(run), key="saved")
        draw(operators_chart(run, block), key="operators")
    if table := checkpointing_rows(run.baseline if isinstance(run, Comparison) else run):
        st.markdown("**Checkpointing by the model itself**")
        frame(table, key="own_checkpointing", alt="What the model checkpoints by itself, and whether it acts")
    st.markdown("**Every block**")
    numbers(saved_bytes_chart(run).rows(), key="block_costs", alt="What every block costs")


def _totals(comparison: Comparison) -> None:
    """FLOPs and times of both runs."""
    st.markdown(glossary.NO_CLOCK if comparison.is_predicted else time_answer(comparison), help=glossary.COST)
    rows = [_row("baseline", comparison.baseline), _row("candidate", comparison.candidate)]
    frame(rows, key="cost_totals", alt="FLOPs and times of both runs")
    if left_out := uncounted_in_words(comparison.candidate):
        small_text(f":orange[{left_out}.]")


def _row(name: str, run: Measurement) -> dict[str, str]:
    row = {
        "run": name,
        "forward": flops(run.forward_flops),
        "recompute": flops(run.recompute_flops),
        "backward": flops(run.backward_flops),
    }
    if run.origin != "predicted":
        row |= {f"{part} time": milliseconds(getattr(run.times, part) if run.times else None) for part in PARTS}
    return row


COLOURS: dict[Verdict, Literal["green", "orange", "violet", "red", "gray"]] = {
    "bitwise equal": "green",
    "rounding": "orange",
    "state moved": "violet",
    "different": "red",
    "not comparable": "gray",
}
ICONS = {
    "bitwise equal": ":material/check_circle:",
    "rounding": ":material/approval:",
    "state moved": ":material/sync_problem:",
    "different": ":material/cancel:",
    "not comparable": ":material/help:",
}


def gradients_panel(comparison: Comparison) -> None:
    """The verdict with its reasons, the tensors, then buffers, random generators, masks and state."""
    verdict = comparison.verdict
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.badge(verdict, icon=ICONS[verdict], color=COLOURS[verdict], help=glossary.GRADIENTS)
        # st.text: names come from the model and must not become markup.
        st.text(verdict_sentence(comparison))
    for sentence in sides(comparison):
        st.text(sentence)
    for cause in comparison.causes:
        st.text(f"Likely cause: {cause}")
    if scope := scope_sentence(comparison):
        st.text(scope)
    if all_equal(comparison):
        with st.container(border=True, key="seal"):
            st.markdown(f"{ICONS[verdict]} **Every bit of {count(comparison.n_gradients, 'gradient')} is the same.**")
            st.table(seal(comparison), border="horizontal")
    else:
        draw(gradient_chart(comparison), key="gradients")
    st.markdown("**What else the step left behind**")
    for key, title, rows in _rest(comparison):
        with fold(f"{title} ({len(rows)})", key=f"rest_{key}"):
            frame(rows, key=f"table_{key}", alt=title)


def _rest(comparison: Comparison) -> list[tuple[str, str, list[dict[str, object]]]]:
    """Further tables of the comparison; checks without rows are left out."""
    checked = [
        ("buffers", "Buffers after the step", diff_table(comparison.buffers)),
        ("inputs", "Gradients of the inputs", diff_table(comparison.input_gradients)),
        ("later", f"Gradients of step {comparison.n_steps}", diff_table(comparison.later_gradients)),
        ("parameters", f"Parameters after {comparison.n_steps} steps", diff_table(comparison.parameters)),
        ("carried", "What else the model carries on, where it differs", carried_table(comparison)),
        ("rng", "Positions of the random generators", rng_table(comparison)),
        ("masks", "Dropout masks, forward against recompute", mask_table(comparison)),
        ("state", "State that the recompute changed a second time", state_change_table(comparison)),
    ]
    return [entry for entry in checked if entry[2]]


WINDOW = 560
"""Pixels of height through which a picture of full size is seen."""
LARGE = 150
"""Nodes from which the browser's layout takes seconds."""


def autograd_panel(state: ExploreState, graph: ModelGraph, pictures: AutogradPictures | None, *, block: str) -> None:
    """Draws the choice of a block, which the worker draws on a press, and the last pictures."""
    st.caption(
        "One node an operation of forward, and the tensors that each one saves for backward. "
        "Recomputed blocks save their input; the rest is made again when backward arrives."
    )
    called = [node.fqn for node in graph.blocks if node.fqn and node.n_calls]
    if not called:
        st.caption("This model has no block inside it that its forward calls; there is no picture to choose.")
        return
    choice, button = st.columns([5, 2], vertical_alignment="bottom")
    with choice:
        drawn = pictures.block if pictures else ""
        usual = next((fqn for fqn in (block, drawn, *graph.repeats) if fqn in called), called[0])
        chosen = st.selectbox("Block", called, index=called.index(usual), key=f"autograd_block_{usual}")
    with button:
        st.button(
            "Draw", icon=":material/account_tree:", key="draw", disabled=state.job.id is not None, width="stretch",
            help="Runs the block's forward twice in the worker: kept and recomputed.",
            on_click=page_job.start, args=(state.job, DrawAutograd(spec=state.draft.spec, block=chosen)),
        )  # fmt: skip
    if pictures is not None:
        st.text(difference(pictures))
        full = st.toggle("Full size", key="autograd_full", help="As large as its words need, to be scrolled.")
        stacked = full or window.narrow()
        left, right = (st.container(), st.container()) if stacked else st.columns(2, gap="small")
        with left:
            _picture(f"{pictures.block} kept", pictures.kept, "kept", full=full)
        with right:
            _picture(f"{pictures.block} recomputed", pictures.recomputed, "recomputed", full=full)


def _picture(title: str, picture: AutogradPicture, key: str, *, full: bool) -> None:
    st.text(title)
    st.caption(caption(picture))
    download(Offer("DOT file", f"autograd-{key}.dot", picture.dot), key=f"dot_{key}")
    if picture.n_nodes > LARGE and not st.toggle(f"Draw all {picture.n_nodes} nodes", key=f"large_{key}"):
        return
    dark = st.context.theme.type == "dark"
    with st.container(height=WINDOW if full else "content", key=f"autograd_{key}"):
        width: Literal["content", "stretch"] = "content" if full else "stretch"
        st.graphviz_chart(themed(picture.dot, dark=dark), width=width, alt=f"Autograd graph of {title}")
