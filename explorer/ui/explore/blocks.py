"""The block graph with its tools: presets, undo, search, and details of the chosen block."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import streamlit as st

from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy import block_names as decision
from explorer.plan.policy.block_names import matching
from explorer.plan.policy.presets import preset, preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.policy import Policy
from explorer.ui import components
from explorer.ui.components import catch_up, last_move
from explorer.ui.explore.budget import SLIDER_KEY
from explorer.ui.explore.view import View, block_prices, ledger_of, price_tag
from explorer.ui.explore.work import Budget, ExploreState
from explorer.ui.session import page_job, window
from explorer.ui.session.repository import KeyedRun
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import escape
from explorer.view.graph.browser import Paint
from explorer.view.graph.geometry import Layout, Window
from explorer.view.graph.labels import Facts, distances_by_block, labels
from explorer.view.memory.timeline import PredictedLine
from explorer.view.text import explore as glossary

HEIGHT = 400
ACTIONS = {"save_ops": "save ops", "offload": "offload"}


def tools(state: ExploreState, graph: ModelGraph, expected: Mapping[str, str]) -> None:
    """Presets, undo, redo, search. `expected`: the predicted effect of each preset of this model, in words."""
    titles = {name: f"{preset_titles()[name]}: {effect}".removesuffix(": ") for name, effect in expected.items()}
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="tools"):
        st.menu_button(
            "Presets",
            list(titles),
            format_func=titles.__getitem__,
            key="presets",
            icon=":material/auto_awesome:",
            help=glossary.PRESETS,
            on_click=lambda: _take_preset(state, graph),
        )
        drafts.undo_buttons(state.draft.history, partial(_undo, state, graph), (glossary.UNDO, glossary.REDO))
        st.selectbox(
            "Search blocks",
            [block.fqn for block in graph.blocks if block.fqn],
            index=None,
            key="search",
            placeholder="Search, or blocks.*.mlp",
            accept_new_options=True,
            help=glossary.SEARCH,
            label_visibility="collapsed",
            icon=":material/search:",
            on_change=lambda: _search(state, graph),
        )


def _undo(state: ExploreState, graph: ModelGraph, *, forward: bool = False) -> None:
    catch_up(SLIDER_KEY)
    state.budget = Budget()  # the text was about the policy that is taken back
    drafts.undo(state.draft, graph, forward=forward)


def _take_preset(state: ExploreState, graph: ModelGraph) -> None:
    catch_up(SLIDER_KEY)
    name = st.session_state.get("presets")
    if name is None:
        return
    draft = state.draft
    with page_job.refusing(state.job):
        drafts.set_policy(draft, drafts.with_units(draft.spec.policy, preset(name, graph).units), graph)


def _search(state: ExploreState, graph: ModelGraph) -> None:
    catch_up(SLIDER_KEY)
    drafts.absorb(state.draft, graph)
    text = st.session_state.get("search")
    if text in graph.by_fqn:
        drafts.jump_to(state.draft, graph, text)
    elif text:
        take_matching(state, graph, text)


def take_matching(state: ExploreState, graph: ModelGraph, pattern: str) -> None:
    """Adds the blocks that match `pattern` to the recomputed blocks."""
    policy = state.draft.spec.policy
    with page_job.refusing(state.job):
        matches = matching(pattern, [block.fqn for block in graph.blocks if block.fqn and block.n_calls])
        new = Policy.recompute(fqn for fqn in matches if fqn not in policy.blocks).units
        drafts.set_policy(state.draft, drafts.with_units(policy, (*policy.units, *new)), graph)


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
    """The drawing itself, and `line` over the timeline; clicks arrive in `shared/draft.py`."""
    graph, policy = facts.graph, facts.policy
    paint = paint_of(facts, drawing, window.laid_out_for(), jump=state.draft.jump)
    marks = drafts.marks_of(state.draft, graph)
    desk = {**clicks_of(state), "line": line and line._asdict()}
    components.block_graph(drawing, marks, paint, key=state.draft.widget, desk=desk)
    _segment_button(state, facts)
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


def clicks_of(state: ExploreState) -> dict[str, object]:
    """The graph, and the last click and move of the slider that this rerun has taken over."""
    marks = state.draft.marks
    seq = marks.seq if marks is not None else 0
    return {"desk": state.draft.widget, "seq": seq, "moved": last_move(SLIDER_KEY)}


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


def _segment_button(state: ExploreState, facts: Facts) -> None:
    """Draws a button that joins the selected block and the next block into one segment."""
    first = drafts.marks_of(state.draft, facts.graph).selected
    second = facts.graph.next_in_turn.get(first)
    if second is None or not {first, second} <= set(facts.policy.blocks):
        return
    if decision.joined(facts.policy, first, second) == facts.policy:
        return
    st.button(
        f"Recompute {escape(first)} and {escape(second)} as one segment",
        icon=":material/join:",
        key="join",
        help=glossary.SEGMENT,
        on_click=drafts.join,
        args=(state.draft, facts.graph, (first, second)),
    )
