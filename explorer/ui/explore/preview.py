"""What components/preview.js draws before the page is there: figures, plans, graph and first chart of a known run.

Graph, tools and slider answer over the route already; the page's graph takes their steps over (graph.js, rule 8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from explorer.ui.components import payload
from explorer.ui.explore import budget, work
from explorer.ui.explore.blocks import about, paint_of
from explorer.ui.explore.desk import desk_of, freeze, tools
from explorer.ui.explore.memory import ABOVE, first_sketch
from explorer.ui.explore.view import view_of
from explorer.ui.session import window
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import results_height
from explorer.view.graph.geometry import layout
from explorer.view.text.explore import ANSWERS, PageAnswer


def preview(query: Mapping[str, str], cookies: Mapping[str, str]) -> dict[str, object] | None:
    """The parts for a visit with `query` in the window of `cookies`; None for a visit that no earlier run answers.

    `query["dark"]` is "1" in a dark theme.
    """
    state, _ = work.first_state(query)
    view, policy, visitor = view_of(state), state.draft.spec.policy, window.of_cookie(cookies)
    if view.graph is None or policy.units or view.answer not in (PageAnswer("another machine"), PageAnswer("measured")):
        return None
    marks = drafts.marks_of(state.draft, view.graph)
    drawing = layout(view.graph, marks.open)
    desk = desk_of(state, drawing)
    assert desk.facts is not None, "the graph is known"
    height, slider = results_height(visitor) - ABOVE, None
    front = budget.points(state, view, budget.search_of(view))
    if len(front) > 1:
        slider = budget.slider(state, view, front, desk.forecast) | {"about": about(state)}
    freeze(state, view.graph, drawing)
    graph = about(state) | {"on": ()}
    return {
        "origin": view.stand_in.in_words if view.stand_in is not None else "",
        "words": ANSWERS[view.answer][0].rpartition("] ")[2],
        "strip": {"cells": list(map(asdict, desk.cells)), "about": graph},
        "tools": tools(desk, state, view.graph) if len(view.graph.blocks) > 1 else None,
        "slider": slider,
        "graph": payload(drawing, marks, paint_of(desk.facts, drawing, visitor)) | graph | {"early": True},
        "chart": first_sketch(view, height, dark=query.get("dark") == "1"),
        "height": height,
    }
