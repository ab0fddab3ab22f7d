"""The Explore page: a policy's savings, its cost and the check of its gradients on one screen.

headline strip                                   redrawn with every toggle (a fragment with the graph)
model, options, graph   |   memory, cost, ...    redrawn when something was measured or selected
run bar                                          looks at the job a few times a second
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from explorer.plan.why.caveats import why_not_predicted
from explorer.record.graph import ModelGraph
from explorer.ui.components import graph_tools, strip
from explorer.ui.explore import budget, work
from explorer.ui.explore.blocks import about, graph_panel
from explorer.ui.explore.desk import desk_of, freeze, tools
from explorer.ui.explore.files import imported_notes, policy_menu, run_menu
from explorer.ui.explore.results import results
from explorer.ui.explore.view import View, drawn_graph, predicted_presets, view_of
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import page_job
from explorer.ui.session.values import whole
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import escape, horizontal, last_failure, small_text, two_columns
from explorer.ui.shared.model import model_row
from explorer.ui.shared.open_model import open_model
from explorer.ui.shared.run_bar import RunBar, run_bar
from explorer.ui.shared.tour import OnPage, outdated, tour_offer, tour_panel
from explorer.ui.shared.tour import current as current_tour
from explorer.view.graph.geometry import layout
from explorer.view.text import explore as glossary
from explorer.view.text.runs import what_failed

FILES_WIDTH = 310


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Parts of the page outside the graph whose words change with a click in the graph."""

    answer: DeltaGenerator
    strip: DeltaGenerator
    run: DeltaGenerator
    download: DeltaGenerator
    notice: DeltaGenerator


def page() -> None:
    """The whole page, top to bottom."""
    with whole():
        state = work.current()
        draft = state.draft
        _take_over(state)
        view = view_of(state)
        budget.search_of(view, start=state.job.id is None)
        drafts.to_address(draft)
        current_tour().n_units = len(draft.spec.policy.units)

    with st.container(
        horizontal=True, horizontal_alignment="right", gap="small", vertical_alignment="center", key="top"
    ):
        answer = st.container(width="stretch")
        with st.container(width="content"):
            open_model(draft, state.job)
        tour_offer()
    slot = st.container()  # unlike st.empty, a container keeps its old content until the new content is there
    left, right = two_columns("results")
    with right:
        notice, above, charts = st.empty(), st.container(), st.container()
    with charts:
        draw_results = results(state, view)
    with st.bottom:
        warning, download = st.empty(), _bar(state, view)
    slots = Slots(answer=answer, strip=slot, run=warning, download=download, notice=notice)
    with left:
        with st.container():
            model_row(draft, partial(drafts.choose_model, draft), key="options_row")
        st.fragment(_desk)(state, slots)
    with above:
        _tour(state, view)
        _trouble(state)
    with charts:
        draw_results()


def _take_over(state: ExploreState) -> None:
    """Takes over results of jobs, clicks in the graph and earlier runs, and starts what the page needs."""
    page_job.attach(state.job, "explore")
    page_job.take_part(state.job, partial(work.take_part, state))
    page_job.settle(state.job, partial(work.take, state))
    if (graph := drawn_graph(state)) is not None:
        work.absorb(state, graph)  # also the window, which `prepare` waits for
    work.measure_next(state)
    work.prepare(state)
    state.charted = state.timeline = None
    if graph is not None:
        work.recall(state)
        budget.settle(state, graph)
        state.draft.redraw = False


def _tour(state: ExploreState, view: View) -> None:
    """Draws the guided tour, which advances with measured results. The model may be read while the page is drawn, so
    the graph is looked up here."""
    if state.draft.predict:
        return
    graph, policy = drawn_graph(state), state.draft.spec.policy
    on_path = current_tour().at is not None
    presets = predicted_presets(replace(view, graph=graph), policy) if view.keep_all and on_path else {}
    on_page = OnPage(
        model=state.draft.spec.model,
        baseline=view.baseline,
        comparison=view.comparison if view.candidate is not None and not view.is_part else None,
        predicted_bytes=presets["all"][1].step_peak_bytes if "all" in presets else None,
        n_units=len(policy.units),
        is_read=graph is not None or state.job.id is None,
    )
    tour_panel(on_page, state.draft, partial(drafts.choose_model, state.draft))


def _trouble(state: ExploreState) -> None:
    """Links that cannot be read, runs that could not be saved, runs without a result."""
    if state.draft.message:
        st.warning(escape(state.draft.message), icon=":material/report:")
    if state.doubt:
        st.warning(escape(state.doubt), icon=":material/gpp_maybe:")
    if state.imported is not None:
        imported_notes(state, state.imported)
    if state.warning:
        st.warning(
            escape(f"{state.warning} Its figures stay here until you leave; the run file can be downloaded now."),
            icon=":material/save:",
        )
    last_failure(state.job, key="last")


def _desk(state: ExploreState, slots: Slots) -> None:
    """Graph and headline strip: the part that answers a click."""
    graph = drawn_graph(state)
    if graph is not None and _changes_charts(state, graph):
        st.rerun()
    drawing = layout(graph, drafts.marks_of(state.draft, graph).open) if graph is not None else None
    desk, policy = desk_of(state, drawing), state.draft.spec.policy
    view, forecast, facts = desk.view, desk.forecast, desk.facts
    with slots.answer:
        small_text(desk.sentence)
    with slots.strip:
        strip(desk.cells, about(state))
    with slots.notice.container():
        if view.did_not_fit:
            st.warning(escape(view.did_not_fit), icon=":material/memory:")
        for sentence in view.baseline.warnings if view.baseline is not None and view.predicted else ():
            st.caption(escape(sentence))
        if view.start is not None and (because := why_not_predicted(policy, graph, forecast, view.start)):
            st.caption(escape(because))
    _danger(slots, desk.danger)
    if graph is not None and drawing is not None and facts is not None:
        if len(graph.blocks) > 1:
            with st.container(key="tools"):
                graph_tools(tools(desk, state, graph))
            budget.budget_row(state, view, graph, forecast, about(state))
        else:
            st.caption(glossary.NO_BLOCKS)
        freeze(state, graph, drawing)
        graph_panel(state, facts, drawing, desk.line)
        is_made = "made to fit" in graph.batch
        for note in filter(None, (graph.note, glossary.MADE_BATCH.format(graph.batch) if is_made else "")):
            st.caption(escape(note))
        needs_rerun = state.charted not in (None, policy) or outdated(len(policy.units))  # an open part shows another
        if needs_rerun:
            st.rerun()
    elif state.job.id is not None:
        st.skeleton(height=400)
    else:
        st.caption("The model was not read, so its blocks cannot be drawn; the reason is on the right.")


def _changes_charts(state: ExploreState, graph: ModelGraph) -> bool:
    """Takes over clicks in the graph. Another block, or a known result, changes the charts."""
    with whole():
        work.absorb(state, graph)
        return work.recall(state) or state.draft.redraw


def _danger(slots: Slots, warning: str) -> None:
    """Shows known hazards beside the buttons that run and download the policy."""
    if warning:
        slots.run.error(warning, icon=":material/gpp_bad:")
        slots.download.error(f"This policy is not safe. {warning}", icon=":material/gpp_bad:")
    else:
        slots.run.empty()
        slots.download.empty()


def _bar(state: ExploreState, view: View) -> DeltaGenerator:
    """Run, progress and cancel at the left, files at the right. Returns the place of a warning beside the download."""
    warning = st.empty()
    graph = view.graph
    with horizontal("bar"):
        with st.container(width="stretch"):
            run_bar(
                state.job,
                RunBar(
                    key="",
                    help=glossary.PREDICT if state.draft.predict else glossary.RUN,
                    label="Predict" if state.draft.predict else "Run",
                    ready=graph is not None and drafts.why_not_run(state.draft) in ("", glossary.NOTHING_RUNS),
                    absorb=lambda: work.absorb(state, graph) if graph is not None else None,
                    start=partial(work.compare, state),
                    take=partial(work.take, state),
                    take_part=partial(work.take_part, state),
                    idle=lambda: st.caption(escape(_next_step(state, view))),
                ),
            )
        if graph is not None:
            with st.container(horizontal=True, gap="small", width=FILES_WIDTH):
                warning = policy_menu(state, graph)
                run_menu(state)
    return warning


def _next_step(state: ExploreState, view: View) -> str:
    """Text beside Run while nothing runs."""
    if state.job.run_failed:
        return "The last run has no result; the reason is shown above."
    if state.draft.predict:
        return glossary.PREDICT_RANKS if state.draft.spec.ranks else glossary.PREDICT_PLAYS
    if why := drafts.why_not_run(state.draft):
        return why
    if view.comparison is not None and view.answer.failed and view.answer.of == "both runs":
        return f"The {what_failed(view.comparison)}; nothing was measured whole."
    # True whatever is clicked next: a click in the graph does not draw this line again.
    return "Run takes real training steps, with everything kept and with this policy."
