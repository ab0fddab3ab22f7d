"""The block graph, and what a click changes in its tools."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy import block_names as decision
from explorer.plan.policy.presets import preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.policy import Policy
from explorer.ui import components
from explorer.ui.explore.view import View, block_prices, ledger_of, price_tag
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import window
from explorer.ui.session.repository import KeyedRun
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import escape
from explorer.view.graph.browser import Paint
from explorer.view.graph.geometry import Layout, Window
from explorer.view.graph.labels import Facts, distances_by_block, labels
from explorer.view.memory.timeline import PredictedLine
from explorer.view.text.plan import effects_of_presets

HEIGHT = 400
ACTIONS = {"save_ops": "save ops", "offload": "offload"}


def tools_of(state: ExploreState, view: View, presets: Mapping[str, tuple[Policy, Forecast]]) -> dict[str, object]:
    """What a click changes in the tools: effects of `presets`, steps that can be undone, blocks that can be joined."""
    peak_bytes, forecasts, history = None, {}, state.draft.history
    if view.baseline is not None:
        peak_bytes = view.baseline.step_peak_bytes
    for name, (policy, forecast) in presets.items():
        forecasts[name] = forecast if policy.units else Forecast()
    titles = []
    for name, effect in effects_of_presets(forecasts, peak_bytes).items():
        titles.append((name, f"{preset_titles()[name]}: {effect}".removesuffix(": ")))
    return {"presets": titles, "undo": bool(history.past), "redo": bool(history.future)}


def to_join(state: ExploreState, graph: ModelGraph) -> tuple[str, ...]:
    """The selected block and the next block, if they can become one segment; else nothing."""
    first, policy = drafts.marks_of(state.draft, graph).selected, state.draft.spec.policy
    second = graph.next_in_turn.get(first)
    if second is None or not {first, second} <= set(policy.blocks):
        return ()
    if decision.joined(policy, first, second) == policy:
        return ()
    return first, second


def facts_of(state: ExploreState, view: View, graph: ModelGraph, drawing: Layout, forecast: Forecast) -> Facts:
    """Facts for the labels of the blocks of `drawing`; `forecast` is about the drawn policy."""
    spec = state.draft.spec
    start = view.keep_all
    if start is None and view.baseline is not None and view.baseline_key is not None:
        start = KeyedRun(view.baseline_key, view.baseline)
    complete = start if start is not None and start.run.complete else None
    priced = complete if not spec.policy.units else None
    if view.candidate is not None:
        priced = KeyedRun(f"candidate of {state.shown}", view.candidate)
    prices = block_prices(priced, graph, [row.id for row in drawing.rows])
    last_candidate = view.comparison.candidate if view.comparison is not None else None
    return Facts(
        graph=graph,
        policy=spec.policy,
        baseline=complete.run if complete is not None else None,
        candidate=view.candidate,
        freed_bytes=forecast.freed_bytes,
        prices={fqn: price_tag(price) for fqn, price in prices.items()},
        hazards=hazards(graph, spec.policy, spec.plan, spec),
        alive=ledger_of(view.baseline, last_candidate, state.tick),
        distances=distances_by_block(view.comparison if not view.stale else None),
    )


def graph_panel(state: ExploreState, facts: Facts, drawing: Layout, line: PredictedLine | None) -> None:
    """The drawing itself, and `line` over the timeline; steps arrive in `shared/draft.py`."""
    graph, policy = facts.graph, facts.policy
    paint = paint_of(facts, drawing, window.laid_out_for(), jump=state.draft.jump)
    desk = {**about(state), "on": policy.blocks, "line": line and line._asdict(), "join": to_join(state, graph)}
    components.block_graph(drawing, drafts.marks_of(state.draft, graph), paint, desk, key=state.draft.widget)
    if facts.alive is not None:
        st.caption("Bars: what each block holds at the picked moment.")
    elif facts.distances:
        st.caption(
            f"Bars: how far gradients are from the baseline's; a full bar is {max(facts.distances.values()):.2g}."
        )
    unknown = decision.unknown_blocks(policy, graph)
    if unknown:
        st.warning(
            escape(f"The policy names {len(unknown)} blocks that this model lacks: {', '.join(unknown[:5])}."),
            icon=":material/warning:",
        )


def about(state: ExploreState) -> dict[str, object]:
    """The graph, and the last step that this rerun has taken over."""
    marks = state.draft.marks or components.GraphMarks()
    return {"desk": state.draft.widget, "taken": marks.last_step}


def paint_of(facts: Facts, drawing: Layout, visitor: Window, *, jump: tuple[str, int] | None = None) -> Paint:
    """The blocks of `drawing` with their labels and actions, for a page in the window of `visitor`."""
    units = facts.policy.units
    return Paint(
        labels=labels(facts, [row.id for row in drawing.rows]),
        segments=tuple(unit.blocks for unit in units if len(unit.blocks) > 1),
        actions={unit.blocks[0]: ACTIONS[unit.action] for unit in units if unit.action in ACTIONS},
        height=HEIGHT + visitor.height - window.USUAL_HEIGHT,
        window=visitor,
        jump=jump,
    )
