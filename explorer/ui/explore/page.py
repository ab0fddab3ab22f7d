"""What does this policy buy, what does it cost, is it still the same gradient? One screen answers.

headline strip                                   redrawn with every toggle (a fragment with the graph)
model, options, graph   |   memory, cost, ...    redrawn when something was measured or selected
run bar                                          looks at the job a few times a second
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import streamlit as st

from explorer.record.base import from_plain
from explorer.record.failure import Failure
from explorer.record.graph import ModelRef
from explorer.record.hazard import Hazard
from explorer.ui.explore import state as states
from explorer.ui.explore import work
from explorer.ui.explore.blocks import graph_panel, tools
from explorer.ui.explore.files import policy_menu, run_menu
from explorer.ui.explore.headline import headline_strip
from explorer.ui.explore.results import results
from explorer.ui.explore.run_bar import run_bar
from explorer.ui.explore.shown import Shown, facts, predicted, shown
from explorer.ui.explore.state import State
from explorer.ui.explore.strip import strip
from explorer.ui.session import backend, window
from explorer.ui.session.plain import plain
from explorer.ui.shared.failure import failure_panel
from explorer.ui.shared.model import arguments_panel, changed_line, model_panel, options_panel
from explorer.view.compare.safety import danger
from explorer.view.words import explore as glossary
from explorer.view.words.cut_short import what_failed
from explorer.view.words.policy import in_words

RIGHT_HEIGHT = 520
FILES_WIDTH = 310


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a click in the graph changes words outside of it."""

    strip: Any
    run: Any
    download: Any
    notice: Any = None


def page() -> None:
    """The whole page, top to bottom."""
    samples = backend.samples()
    first = samples[0]
    state = states.current(ModelRef(target=first.target, size=next(iter(first.sizes), None)), samples)
    work.attach(state)
    work.settle(state)
    work.prepare(state)
    if (graph := backend.graph_of(states.spec_of(state).model)) is not None:
        states.absorb(state, graph)
        work.recall(state)
        state["redraw"] = False
    states.to_address(state)

    slot = st.empty()
    with st.bottom:
        places = Places(strip=slot, run=st.empty(), download=_bar(state))
    if window.narrow():
        left, right, height = st.container(), st.container(), None
    else:
        left, right = st.columns([6, 8], gap="medium")
        height = RIGHT_HEIGHT + window.extra_height()
    with right, st.container(height=height or "content", border=False, key="results"):
        places = replace(places, notice=st.empty())
        charts = st.container()
    with left:
        _choices(state, samples)
        st.fragment(_desk)(state, places)
    with charts:
        _trouble(state)
        if window.is_known() or graph is None:
            results(state)
        else:
            st.skeleton(height=320)


def _trouble(state: State) -> None:
    """Links that cannot be read, runs that could not be saved, runs without a result."""
    if state["message"]:
        st.warning(plain(state["message"]), icon=":material/link_off:")
    if state["doubt"]:
        st.warning(plain(state["doubt"]), icon=":material/gpp_maybe:")
    if state["warning"]:
        st.warning(
            plain(f"{state['warning']} Its figures stay here until you leave; the run file can be downloaded now."),
            icon=":material/save:",
        )
    if state["failure"] and failure_panel(from_plain(state["failure"], Failure), key="last"):
        state["failure"] = None
        st.rerun()


def _choices(state: State, samples: tuple[Any, ...]) -> None:
    """Model and options; a change takes effect at once, but runs nothing except the first look at a new model."""
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="options_row"):
        model_panel(spec.model, samples, partial(states.choose_model, state))
        arguments_panel(spec.model, samples, partial(states.choose_model, state))
        options_panel(spec, graph, partial(states.set_option, state, graph))
    changed_line(spec)


def _desk(state: State, places: Places) -> None:
    """Graph and headline strip: the part that answers a click."""
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    if graph is not None:
        states.absorb(state, graph)
        spec = states.spec_of(state)
        if work.recall(state) or state["redraw"]:  # another block, or a result that is known: the charts show it
            st.rerun()
    known = shown(state)
    foreseen = predicted(known, graph, spec.policy)
    drawn = facts(state, graph, known, foreseen) if graph is not None else None
    found = drawn.hazards if drawn is not None else ()
    with places.strip.container():
        headline_strip(strip(known, foreseen, spec.policy, found))
    with places.notice.container():
        st.caption(_freshness(known))
    _danger(places, found)
    if graph is not None and drawn is not None:
        tools(state, graph)
        graph_panel(state, drawn)
    elif state["job"]:
        st.skeleton(height=400)
    else:
        st.caption("The model was not read, so its blocks cannot be drawn; the reason stands at the right.")


def _freshness(known: Shown) -> str:
    """What the figures are about, and where a run was cut short."""
    said = glossary.FRESHNESS[known.freshness]
    if known.pinned is not None and known.freshness != "nothing":
        said = f"{glossary.PINNED} {plain(in_words(known.pinned))}. " + ("" if known.freshness == "pinned" else said)
    if known.freshness == "failed" and known.comparison is not None:
        return f"{said} The {plain(what_failed(known.comparison))}."
    return said


def _danger(places: Places, found: tuple[Hazard, ...]) -> None:
    """What is known to go wrong stands where a person runs the policy, and where it is taken away."""
    said = plain(danger(found))
    if said:
        places.run.error(said, icon=":material/gpp_bad:")
        places.download.error(f"This policy is not safe. {said}", icon=":material/gpp_bad:")
    else:
        places.run.empty()
        places.download.empty()


def _bar(state: State) -> Any:
    """Run, progress and cancel at the left, files at the right. Returns the place of a warning beside the download."""
    warned = st.empty()
    graph = backend.graph_of(states.spec_of(state).model)
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="bar"):
        with st.container(width="stretch"):
            run_bar(state, graph)
        if graph is not None:
            with st.container(horizontal=True, gap="small", width=FILES_WIDTH):
                warned = policy_menu(state, graph)
                run_menu(state)
    return warned
