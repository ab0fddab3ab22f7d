"""What does this policy buy, what does it cost, is it still the same gradient? One screen answers.

headline strip                                   redrawn with every toggle (a fragment with the graph)
model, options, graph   |   memory, cost, ...    redrawn when something was measured or selected
run bar                                          looks at the job a few times a second
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import streamlit as st

from explorer.jobs.protocol import DeriveMatrix, DrawAutograd
from explorer.plan.hazards import hazards
from explorer.record.base import from_plain
from explorer.record.comparison import Comparison
from explorer.record.forecast import Forecast
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Failure, Measurement
from explorer.ui import backend, glossary, work
from explorer.ui import state as states
from explorer.ui.figures import strip
from explorer.ui.forecast import forecast, price_tags
from explorer.ui.labels import Facts
from explorer.ui.panels.autograd import autograd_panel
from explorer.ui.panels.blocks import graph_panel, tools
from explorer.ui.panels.cost import cost_panel
from explorer.ui.panels.failure import failure_panel
from explorer.ui.panels.files import policy_menu, run_menu
from explorer.ui.panels.gradients import gradients_panel, hazards_panel, matrix_panel
from explorer.ui.panels.headline import headline_strip
from explorer.ui.panels.memory import OF_BASELINE, OF_CANDIDATE, ledger_of, memory_panel
from explorer.ui.panels.model import arguments_panel, model_panel, options_panel
from explorer.ui.panels.run_bar import run_bar
from explorer.ui.panels.table import table_panel
from explorer.ui.plain import plain
from explorer.ui.state import State
from explorer.view.nesting import RUN
from explorer.view.units import count

TABS = ["Memory", "Cost", "Gradients", "Blocks", "Autograd"]
RIGHT_HEIGHT = 520
FILES_WIDTH = 310


def page() -> None:
    """The whole page, top to bottom."""
    samples = backend.samples()
    first = samples[0]
    state = states.current(ModelRef(target=first.target, size=next(iter(first.sizes), None)), samples)
    work.attach(state)
    work.settle(state)
    work.prepare(state)
    states.to_address(state)

    slot = st.empty()
    if states.narrow():
        left, right, height = st.container(), st.container(), None
    else:
        left, right = st.columns([6, 8], gap="medium")
        height = RIGHT_HEIGHT + states.extra_height()
    with right, st.container(height=height or "content", border=False, key="results"):
        notice = st.empty()
        _trouble(state)
        _results(state)
    with left:
        _choices(state, samples)
        st.fragment(_desk)(state, slot, notice)
    with st.bottom:
        _bar(state)


def _trouble(state: State) -> None:
    """Links that cannot be read, runs that could not be saved, runs without a result."""
    if state["message"]:
        st.warning(plain(state["message"]), icon=":material/link_off:")
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
        model = model_panel(spec, samples)
        if model == spec.model:
            model = arguments_panel(model, samples)
        chosen = options_panel(spec, graph)
    if model != spec.model:
        states.choose_model(state, model)
        st.rerun()
    if chosen != spec:
        if graph is not None and chosen.policy != spec.policy:
            states.set_policy(state, chosen.policy, graph)
        states.choose(state, chosen)
        st.rerun()


def _desk(state: State, slot: Any, notice: Any) -> None:
    """Graph and headline strip: the part that answers a click."""
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    if graph is not None:
        states.absorb(state, graph)
        spec = states.spec_of(state)
        if state["redraw"]:  # another block was selected: the charts beside the graph show its bytes
            state["redraw"], state["by_role"] = False, bool(states.marks_of(state, graph)["selected"])
            st.rerun()
    shown = _shown(state)
    predicted = forecast(shown.baseline, spec.policy, key=shown.baseline_key)
    with slot.container():
        headline_strip(strip(shown.comparison, shown.baseline, predicted, spec.policy, stale=shown.stale))
    notice.caption(glossary.FRESHNESS[shown.freshness])
    if graph is not None:
        tools(state, graph)
        graph_panel(state, _facts(state, graph, shown, predicted))
    elif state["job"]:
        st.skeleton(height=400)
    else:
        st.caption("The model was not read, so its blocks cannot be drawn; the reason stands at the right.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What was measured, and whether it is about the policy that is drawn now."""

    comparison: Comparison | None
    baseline: Measurement | None
    baseline_key: str | None
    stale: bool
    other_options: bool = False
    """Whether the baseline ran under options, a seed or a device that were changed since."""

    @property
    def candidate(self) -> Measurement | None:
        """Only if it ran under the policy that is drawn now."""
        return self.comparison.candidate if self.comparison is not None and not self.stale else None

    @property
    def freshness(self) -> str:
        if self.comparison is None:
            if self.baseline is None:
                return "nothing"
            if self.other_options:
                return "other options"
            return "pinned" if self.baseline.spec.policy.units else "baseline"
        return "stale" if self.stale else "fresh"


def _shown(state: State) -> Shown:
    comparison: Comparison | None = work.result(state, "shown")
    baseline: Measurement | None = work.result(state, "baseline")
    key = state["baseline"]
    if comparison is not None and comparison.baseline.spec == states.baseline_of(state):
        baseline, key = comparison.baseline, state["shown"]
    stale = comparison is not None and comparison.candidate.spec != states.spec_of(state)
    bare = msgspec.structs.replace(states.spec_of(state), policy=baseline.spec.policy) if baseline else None
    return Shown(
        comparison=comparison,
        baseline=baseline,
        baseline_key=key,
        stale=stale,
        other_options=baseline is not None and baseline.spec != bare,
    )


def _facts(state: State, graph: ModelGraph, shown: Shown, predicted: Forecast) -> Facts:
    """Everything that stands on the blocks."""
    spec = states.spec_of(state)
    priced = shown.candidate or (shown.baseline if not spec.policy.units else None)
    drawn = shown.comparison.candidate if shown.comparison is not None else None
    return Facts(
        graph=graph,
        policy=spec.policy,
        baseline=shown.baseline,
        candidate=shown.candidate,
        freed_bytes=predicted.freed_bytes,
        prices=price_tags(priced, key=f"{state['shown'] if shown.candidate else shown.baseline_key}"),
        hazards=hazards(graph, spec.policy, spec.plan, spec),
        alive=ledger_of(shown.baseline, drawn, _picked(state)),
    )


def _picked(state: State) -> tuple[str, int] | None:
    return (state["tick"][0], state["tick"][1]) if state["tick"] else None


def _results(state: State) -> None:
    """The tabs; hidden ones are not computed."""
    graph = backend.graph_of(states.spec_of(state).model)
    comparison: Comparison | None = work.result(state, "shown")
    baseline = comparison.baseline if comparison is not None else work.result(state, "baseline")
    tabs = st.tabs(TABS, key="tabs", on_change="rerun")
    if baseline is None:
        with tabs[0]:
            _waiting(state)
        return
    block = states.marks_of(state, graph)["selected"].removeprefix(RUN) if graph is not None else ""
    memory, cost, gradients, blocks, autograd = tabs
    if memory.open:
        with memory:
            _memory(state, baseline, comparison, graph, block)
    if cost.open:
        with cost:
            cost_panel(comparison) if comparison else st.caption(glossary.EMPTY)
    if gradients.open:
        with gradients:
            _gradients(state, graph, comparison)
    if blocks.open:
        with blocks:
            table_panel(comparison or baseline)
    if autograd.open and graph is not None:
        with autograd:
            asked = autograd_panel(graph, work.result(state, "pictures"), block=block, busy=state["job"] is not None)
            if asked is not None:
                work.start(state, DrawAutograd(spec=states.spec_of(state), block=asked))
                st.rerun()


def _waiting(state: State) -> None:
    if state["job"]:
        st.caption("The model is read and its baseline measured; the charts follow in a few seconds.")
        st.skeleton(height=320)
    else:
        st.caption("Nothing was measured yet. Press **Run** at the bottom.")


def _memory(
    state: State, baseline: Measurement, comparison: Comparison | None, graph: ModelGraph | None, block: str
) -> None:
    for name, run in (("baseline", baseline), ("candidate", comparison.candidate if comparison else None)):
        if run is not None and run.failure is not None:
            failure_panel(run.failure, key=name)
    if state["by_role"]:
        st.session_state["memory_view"] = OF_CANDIDATE if comparison else OF_BASELINE
        state["by_role"] = False
    picked = memory_panel(baseline, comparison, graph, block=block, picked=_picked(state))
    if picked != _picked(state):
        state["tick"] = list(picked) if picked else None
        st.rerun()


def _gradients(state: State, graph: ModelGraph | None, comparison: Comparison | None) -> None:
    spec = states.spec_of(state)
    if graph is not None:
        found = hazards(graph, spec.policy, spec.plan, spec)
        with st.expander(
            f"Known before any run: {count(len(found), 'hazard')}", icon=":material/warning:", key="hazards"
        ):
            hazards_panel(found)
    if comparison is None:
        st.caption(glossary.EMPTY)
        return
    if comparison.failure is not None:
        failure_panel(comparison.failure, key="comparison")
    gradients_panel(comparison)
    if matrix_panel(work.result(state, "matrix"), busy=state["job"] is not None):
        work.start(state, DeriveMatrix(spec=spec))
        st.rerun()


def _bar(state: State) -> None:
    """Run, progress and cancel at the left, files at the right."""
    graph = backend.graph_of(states.spec_of(state).model)
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="bar"):
        with st.container(width="stretch"):
            run_bar(state, graph)
        if graph is not None:
            with st.container(horizontal=True, gap="small", width=FILES_WIDTH):
                policy_menu(state, graph)
                run_menu(state)
