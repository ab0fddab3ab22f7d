"""What a click changes on the Explore page: figures, sentence, labels of blocks, hazards and the predicted line.

page.py draws a `Desk` in every rerun. `answer` returns the same for a click that Streamlit does not know yet. It reads
the `Keys` that the last rerun froze, with a copy of the visitor's state: it runs in a thread of the server.

    click ──▶ POST /answer ──▶ the desk of its policy, drawn by the browser at once
      └── 0.2 s of rest, or a press outside the graph ──▶ Streamlit ──▶ the same desk, then the charts
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass

from msgspec.structs import replace

from explorer.plan.policy.block_names import policy_after
from explorer.plan.policy.presets import preset_titles
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.policy import Policy
from explorer.ui.components import Cell
from explorer.ui.explore import work
from explorer.ui.explore.blocks import facts_of, paint_of
from explorer.ui.explore.budget import SliderPlans, policy_line
from explorer.ui.explore.headline import Drawn, cells, freshness_line
from explorer.ui.explore.headline import answer as answer_sentence
from explorer.ui.explore.memory import line_of
from explorer.ui.explore.view import View, drawn_graph, predicted, predicted_presets, view_of, worth_recomputing
from explorer.ui.explore.work import ExploreState
from explorer.ui.session.repository import Recent
from explorer.ui.session.window import of_cookie
from explorer.ui.shared.draft import marks_of, with_units
from explorer.ui.shared.elements import escape
from explorer.view.compare.headline import danger
from explorer.view.graph.browser import words
from explorer.view.graph.geometry import Layout
from explorer.view.graph.labels import Facts
from explorer.view.memory.timeline import PredictedLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """The parts of the page that follow a click, for one policy."""

    view: View
    forecast: Forecast
    presets: dict[str, tuple[Policy, Forecast]]
    sentence: str
    """Markdown."""
    cells: tuple[Cell, ...]
    danger: str
    """Markdown on known hazards; empty if none is known."""
    facts: Facts | None
    """None: the model is not described yet."""
    line: PredictedLine | None
    """The dashed line over the timeline; None if no timeline is drawn, or the policy has no forecast."""


def desk_of(state: ExploreState, drawing: Layout | None) -> Desk:
    """The desk of the drawn policy, with labels for the blocks of `drawing`."""
    policy, view = state.draft.spec.policy, view_of(state)
    graph, forecast, presets = view.graph, predicted(view, policy), predicted_presets(view, policy)
    facts, worth = None, frozenset[str]()
    if graph is not None and drawing is not None:
        facts, worth = facts_of(state, view, graph, drawing, forecast), worth_recomputing(graph)
    hazards = facts.hazards if facts is not None else ()
    drawn = Drawn(policy=policy, forecast=forecast, hazards=hazards, worth=worth)
    title = next((preset_titles()[name] for name, (chosen, _) in presets.items() if chosen == policy), "")
    sentence = freshness_line(view, answer_sentence(view, drawn, title))
    if view.imaginary_card:
        sentence += f" On {escape(view.imaginary_card)}: bytes of torch's allocator, no values, no times."
    return Desk(
        view=view,
        forecast=forecast,
        presets=presets,
        sentence=sentence,
        cells=cells(view, drawn),
        danger=escape(danger(hazards)),
        facts=facts,
        line=line_of(view, policy, *state.timeline) if state.timeline is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the last rerun drew from. Its state has the keys of records in the repository of the server."""

    state: ExploreState
    """A copy, which no rerun changes."""
    revision: int
    """Of the marks in the graph."""
    graph: ModelGraph
    drawing: Layout
    slider: SliderPlans


_keys: Recent[Keys] = Recent(64)
"""Of the pages drawn last, by the key of the graph."""


def _copy(state: ExploreState, policy: Policy) -> ExploreState:
    draft = dataclasses.replace(state.draft, spec=replace(state.draft.spec, policy=policy))
    job, budget = dataclasses.replace(state.job), dataclasses.replace(state.budget)
    return dataclasses.replace(state, draft=draft, job=job, budget=budget)


def freeze(state: ExploreState, graph: ModelGraph, drawing: Layout, slider: SliderPlans) -> None:
    """Freezes what this rerun draws from. Questions about the graph are answered from it until the next rerun."""
    draft = state.draft
    frozen, revision = _copy(state, draft.spec.policy), marks_of(draft, graph).revision
    _keys.add(draft.widget, Keys(state=frozen, revision=revision, graph=graph, drawing=drawing, slider=slider))


class BrowserMarks(Record):
    """Marks in the browser that Streamlit does not know yet."""

    graph: str
    """Key of the graph."""
    base: int
    """Revision of the page's marks that these stand on."""
    on: tuple[str, ...]
    """Blocks to recompute; with `place`, blocks whose mark was flipped since the slider was moved there."""
    place: int | None = None
    version: int = 0
    """Of the slider's labels."""
    rows: tuple[str, ...] | None = None
    """Rows of the graph whose words the browser draws; None: all of them."""


def answer_to(marks: BrowserMarks) -> dict[str, object] | None:
    """What the browser draws for the marks of `marks`; None if the page now stands on other marks, or is gone."""
    keys = _keys.get(marks.graph)
    if keys is None or keys.revision != marks.base:
        return None
    drawn, on = keys.state.draft.spec.policy, set(marks.on)
    policy = drawn
    if marks.place is not None:
        plans = keys.slider.plans
        if marks.version != keys.slider.version or not 0 <= marks.place < len(plans):
            return None
        policy = with_units(policy, plans[marks.place])
        on ^= set(policy.blocks)
    if not on <= {*keys.graph.by_fqn, *drawn.blocks}:
        return None
    if marks.rows is not None:
        rows = tuple(row for row in keys.drawing.rows if row.id in marks.rows)
        keys = dataclasses.replace(keys, drawing=replace(keys.drawing, rows=rows))
    return answer(keys, policy_after(policy, on, keys.graph))


def answer(keys: Keys, policy: Policy) -> dict[str, object] | None:
    """What the browser draws for `policy`, as a rerun with `keys` would draw it; None if the model was read since."""
    state = _copy(keys.state, policy)
    graph = drawn_graph(state)
    if graph is None or graph.fingerprint != keys.graph.fingerprint:
        return None
    work.recall(state)
    desk = desk_of(state, keys.drawing)
    parts: dict[str, object] = {
        "on": policy.blocks,
        "sentence": desk.sentence,
        "cells": list(map(asdict, desk.cells)),
        "budget": policy_line(state, desk.view, desk.forecast),
        "danger": desk.danger,
        "line": desk.line and desk.line._asdict(),
    }
    if desk.facts is not None:
        parts |= words(keys.drawing, paint_of(desk.facts, keys.drawing, of_cookie({})))
    return parts
