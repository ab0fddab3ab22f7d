"""What a click changes on the Explore page: figures, sentence, labels of blocks, tools, hazards and predicted line.

page.py draws a `Desk` in every rerun. `answer` returns the same for a click that Streamlit does not know yet. It reads
the `Keys` that the last rerun froze, with a copy of the visitor's state: it runs in a thread of the server.

    click, preset, undo, move of the slider ──▶ POST /answer ──▶ the desk of its policy, drawn by the browser at once
      └── 0.2 s of rest, or a press outside ──▶ Streamlit ──▶ the same desk, then the charts
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from msgspec.structs import replace

from explorer.plan.policy.presets import preset_titles
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.run import RunSpec
from explorer.ui.components import BrowserStep, Cell, GraphMarks
from explorer.ui.explore import work
from explorer.ui.explore.blocks import about, facts_of, paint_of, to_join, tools_of
from explorer.ui.explore.budget import policy_line
from explorer.ui.explore.headline import Drawn, cells, freshness_line
from explorer.ui.explore.headline import answer as answer_sentence
from explorer.ui.explore.memory import line_of
from explorer.ui.explore.view import View, drawn_graph, predicted, predicted_presets, view_of, worth_recomputing
from explorer.ui.explore.work import ExploreState
from explorer.ui.session.repository import Recent
from explorer.ui.session.window import of_cookie
from explorer.ui.shared.draft import marks_of, take_step
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
    tools: dict[str, object]
    """Of the graph: presets with their effects, undo, redo."""
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
        tools=tools_of(state, view, presets),
        sentence=sentence,
        cells=cells(view, drawn),
        danger=escape(danger(hazards)),
        facts=facts,
        line=line_of(view, policy, *state.timeline) if state.timeline is not None else None,
    )


def tools(desk: Desk, state: ExploreState, graph: ModelGraph) -> dict[str, object]:
    """Data of the tools above the graph."""
    names = [block.fqn for block in graph.blocks if block.fqn]
    return {**desk.tools, "names": names, "about": about(state)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the last rerun drew from. Its state has the keys of records in the repository of the server."""

    state: ExploreState
    """A copy, which no rerun changes."""
    graph: ModelGraph
    drawing: Layout


_keys: Recent[Keys] = Recent(64)
"""Of the pages drawn last, by the key of the graph."""


def _copy(state: ExploreState, spec: RunSpec) -> ExploreState:
    marks = dataclasses.replace(state.draft.marks or GraphMarks())
    history = dataclasses.replace(state.draft.history, past=[*state.draft.history.past])
    history.future = [*state.draft.history.future]
    draft = dataclasses.replace(state.draft, spec=spec, marks=marks, history=history)
    job, budget = dataclasses.replace(state.job), dataclasses.replace(state.budget)
    return dataclasses.replace(state, draft=draft, job=job, budget=budget)


def freeze(state: ExploreState, graph: ModelGraph, drawing: Layout) -> None:
    """Freezes what this rerun draws from. Questions about the graph are answered from it until the next rerun."""
    _keys.add(state.draft.widget, Keys(state=_copy(state, state.draft.spec), graph=graph, drawing=drawing))


class AnswerRequest(Record):
    """What a person did in the browser that Streamlit does not know yet."""

    graph: str
    """Key of the graph."""
    steps: tuple[BrowserStep, ...]
    rows: tuple[str, ...] | None = None
    """Rows of the graph whose words the browser draws; None: all of them."""


def answer_to(request: AnswerRequest) -> dict[str, object] | None:
    """What the browser draws after the steps of `request`; None if the page is gone."""
    keys = _keys.get(request.graph)
    if keys is None:
        return None
    if request.rows is not None:
        rows = tuple(row for row in keys.drawing.rows if row.id in request.rows)
        keys = dataclasses.replace(keys, drawing=replace(keys.drawing, rows=rows))
    return answer(keys, request.steps)


def answer(keys: Keys, steps: Iterable[BrowserStep]) -> dict[str, object] | None:
    """What the browser draws after `steps`, as a rerun with `keys` would draw it; None if the model was read since.

    Steps that the rerun knew are left out.
    """
    state = _copy(keys.state, keys.state.draft.spec)
    graph, draft = drawn_graph(state), state.draft
    if graph is None or graph.fingerprint != keys.graph.fingerprint:
        return None
    last_step = marks_of(draft, graph).last_step
    for step in steps:
        if step.n > last_step:
            take_step(draft, graph, step)
    work.forget_budget(state)
    work.recall(state)
    desk = desk_of(state, keys.drawing)
    parts: dict[str, object] = {
        "on": draft.spec.policy.blocks,
        "sentence": desk.sentence,
        "cells": list(map(asdict, desk.cells)),
        "budget": policy_line(state, desk.view, desk.forecast),
        "danger": desk.danger,
        "line": desk.line and desk.line._asdict(),
        "tools": desk.tools,
        "join": to_join(state, graph),
    }
    if desk.facts is not None:
        parts |= words(keys.drawing, paint_of(desk.facts, keys.drawing, of_cookie({})))
    return parts
