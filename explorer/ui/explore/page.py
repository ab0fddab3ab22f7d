"""The Explore page: a policy's savings, its cost and the check of its gradients on one screen.

headline strip                                   redrawn with every toggle (a fragment with the graph)
model, options, graph   |   memory, cost, ...    redrawn when something was measured or selected
run bar                                          looks at the job a few times a second
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import streamlit as st

from explorer.plan.why.caveats import why_not_predicted
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.policy_file import Reading
from explorer.ui.explore import exports, plans, work
from explorer.ui.explore import state as states
from explorer.ui.explore.blocks import graph_panel, tools
from explorer.ui.explore.budget import budget_row
from explorer.ui.explore.files import policy_menu, run_menu
from explorer.ui.explore.forecast import worth_recomputing
from explorer.ui.explore.headline import Drawn, cells
from explorer.ui.explore.results import results
from explorer.ui.explore.shown import Freshness, Shown, facts, predicted, predicted_presets, shown
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import page_job, window
from explorer.ui.session.plain import plain
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.failure import last_failure
from explorer.ui.shared.model import model_row
from explorer.ui.shared.readable import small
from explorer.ui.shared.run_bar import RunBar, run_bar
from explorer.ui.shared.strip import strip
from explorer.ui.shared.tour import OnPage, outdated, page_begins, tour_panel
from explorer.view.compare.headline import danger
from explorer.view.text import explore as glossary
from explorer.view.text.plan import expected, in_words
from explorer.view.text.runs import what_failed

RIGHT_HEIGHT = 520
FILES_WIDTH = 310


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places outside the graph whose words change with a click in the graph."""

    strip: Any
    run: Any
    download: Any
    notice: Any = None


def page() -> None:
    """The whole page, top to bottom."""
    state = states.current()
    draft = state.draft
    page_job.attach(state.job, work.ASKED)
    page_job.settle(state.job, partial(work.take, state))
    work.measure_next(state)
    work.prepare(state)
    state.charted = None
    if (graph := drafts.graph_of(draft)) is not None:
        drafts.absorb(draft, graph)
        states.follow_selection(state, graph)
        work.recall(state)
        plans.settle(state, graph)
        draft.redraw = False
    view = shown(state)
    plans.look(view, graph, start=state.job.id is None)
    drafts.to_address(draft)
    page_begins(len(draft.spec.policy.units))

    slot = st.empty()
    with st.bottom:
        places = Places(strip=slot, run=st.empty(), download=_bar(state, view))
    if window.narrow():
        left, right, height = st.container(), st.container(), None
    else:
        left, right = st.columns([6, 8], gap="medium")
        height = RIGHT_HEIGHT + window.extra_height()
    with right, st.container(height=height or "content", border=False, key="results"):
        places = replace(places, notice=st.empty())
        charts = st.container()
    with left:
        model_row(draft, partial(drafts.choose_model, draft), key="options_row")
        st.fragment(_desk)(state, places)
    with charts:
        _tour(state, view)
        _trouble(state)
        if window.is_known() or graph is None:
            results(state, view)
        else:
            st.skeleton(height=320)


def _tour(state: ExploreState, view: Shown) -> None:
    """Draws the guided tour, which advances with measured results. The model may be read while the page is drawn, so
    the graph is looked up here."""
    if state.draft.predict:
        return
    graph, policy = drafts.graph_of(state.draft), state.draft.spec.policy
    presets = predicted_presets(view, graph, policy) if graph is not None and view.kept else {}
    seen = OnPage(
        model=state.draft.spec.model,
        baseline=view.baseline,
        comparison=view.comparison if view.candidate is not None else None,
        foreseen_bytes=presets["all"][1].step_peak_bytes if "all" in presets else None,
        n_units=len(policy.units),
        is_read=graph is not None or state.job.id is None,
    )
    tour_panel(seen, state.draft, partial(drafts.choose_model, state.draft))


def _trouble(state: ExploreState) -> None:
    """Links that cannot be read, runs that could not be saved, runs without a result."""
    if state.draft.message:
        st.warning(plain(state.draft.message), icon=":material/link_off:")
    if state.doubt:
        st.warning(plain(state.doubt), icon=":material/gpp_maybe:")
    if state.read is not None:
        _told(state, state.read)
    if state.warning:
        st.warning(
            plain(f"{state.warning} Its figures stay here until you leave; the run file can be downloaded now."),
            icon=":material/save:",
        )
    last_failure(state.job, key="last")


def _told(state: ExploreState, read: Reading) -> None:
    """Draws notes on an imported policy, until a person dismisses them."""
    with st.container(border=True, key="read_policy"):
        small(f":{exports.COLOURS[read.fit]}-badge[{read.fit}] read from {plain(read.source)}")
        for sentence in read.told:
            small(plain(sentence))
        if st.button("Understood", key="read_understood", type="tertiary", icon=":material/check:"):
            state.read = None
            st.rerun()


def _desk(state: ExploreState, places: Places) -> None:
    """Graph and headline strip: the part that answers a click."""
    graph = drafts.graph_of(state.draft)
    if graph is not None:
        drafts.absorb(state.draft, graph)
        if work.recall(state) or state.draft.redraw:  # another block or a known result changes the charts
            st.rerun()
    policy, known = state.draft.spec.policy, shown(state)
    foreseen = predicted(known, graph, policy)
    drawn = facts(state, graph, known, foreseen) if graph is not None else None
    hazards = drawn.hazards if drawn is not None else ()
    with places.strip.container():
        worth = worth_recomputing(graph) if graph is not None else frozenset()
        strip(cells(known, Drawn(policy=policy, forecast=foreseen, hazards=hazards, worth=worth)))
    with places.notice.container():
        if known.did_not_fit:
            st.warning(plain(known.did_not_fit), icon=":material/memory:")
        small(_freshness(known))
        for sentence in known.baseline.warnings if known.baseline is not None and known.foreseen else ():
            st.caption(plain(sentence))
        if known.kept is not None and (because := why_not_predicted(policy, graph, foreseen, known.kept)):
            st.caption(plain(because))
    _danger(places, hazards)
    if graph is not None and drawn is not None:
        peak = known.baseline.step_peak_bytes if known.baseline else None
        presets = predicted_presets(known, graph, policy)
        effects = {name: expected(one, peak) if chosen.units else "" for name, (chosen, one) in presets.items()}
        tools(state, graph, effects)
        budget_row(state, known, graph, foreseen)
        graph_panel(state, drawn)
        if state.charted not in (None, policy) or outdated(len(policy.units)):  # what follows the graph is open
            st.rerun()
        if len(graph.blocks) == 1:
            st.caption(glossary.NO_BLOCKS)
        if graph.note:
            st.caption(graph.note)
    elif state.job.id is not None:
        st.skeleton(height=400)
    else:
        st.caption("The model was not read, so its blocks cannot be drawn; the reason stands at the right.")


def _freshness(known: Shown) -> str:
    """Words for the run that the figures are about, and for a run that was cut short."""
    line = glossary.FRESHNESS[known.freshness]
    if known.baseline is not None and known.freshness is Freshness.RECORDED:
        return f"{line} {plain(known.baseline.recorded_in)}. {glossary.NO_MODEL}"
    if known.pinned is not None and known.freshness is not Freshness.NOTHING:
        line = f"{glossary.FITTED if known.did_not_fit else glossary.PINNED} {plain(in_words(known.pinned))}. " + (
            "" if known.freshness is Freshness.PINNED else line
        )
    if known.freshness is Freshness.FAILED and known.comparison is not None:
        return f"{line} The {plain(what_failed(known.comparison))}."
    return line


def _danger(places: Places, hazards: tuple[Hazard, ...]) -> None:
    """Shows known hazards beside the buttons that run and download the policy."""
    warning = plain(danger(hazards))
    if warning:
        places.run.error(warning, icon=":material/gpp_bad:")
        places.download.error(f"This policy is not safe. {warning}", icon=":material/gpp_bad:")
    else:
        places.run.empty()
        places.download.empty()


def _bar(state: ExploreState, view: Shown) -> Any:
    """Run, progress and cancel at the left, files at the right. Returns the place of a warning beside the download."""
    warned = st.empty()
    graph = drafts.graph_of(state.draft)
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="bar"):
        with st.container(width="stretch"):
            run_bar(
                state.job,
                RunBar(
                    key="",
                    help=glossary.PREDICT if state.draft.predict else glossary.RUN,
                    label="Predict" if state.draft.predict else "Run",
                    ready=graph is not None and not state.draft.spec.model.is_recorded,
                    start=lambda: _start(state, graph),
                    take=partial(work.take, state),
                    idle=lambda: st.caption(plain(_next_step(state, view))),
                ),
            )
        if graph is not None:
            with st.container(horizontal=True, gap="small", width=FILES_WIDTH):
                warned = policy_menu(state, graph)
                run_menu(state)
    return warned


def _start(state: ExploreState, graph: ModelGraph | None) -> None:
    if graph is not None:
        drafts.absorb(state.draft, graph)
    work.compare(state)


def _next_step(state: ExploreState, view: Shown) -> str:
    """Text beside Run while nothing runs."""
    if state.job.run_failed:
        return "The last run has no result; the reason is shown above."
    if state.draft.predict:
        return "Predict plays a step of the policy that is drawn. Nothing is allocated and nothing runs."
    if why := drafts.why_not_run(state.draft):
        return why
    if view.freshness is Freshness.FAILED and view.comparison is not None:
        return f"The {what_failed(view.comparison)}; nothing was measured whole."
    # True whatever is clicked next: a click in the graph does not draw this line again.
    return "Run takes real steps of the baseline and of the policy that is drawn."
