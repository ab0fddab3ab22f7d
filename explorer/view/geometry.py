"""Where each block, each edge and each possible cut stands in the drawing: records in, records out, in pixels.

Top to bottom in the order data flows. An edge between neighbours is an arrow in the gap; every other edge is a skip
and runs through a lane of its own in the gutter at the right of the box that holds both ends.

    ┌ block ───────────────┐
    │ ┌──────────────┐     │      horizontal positions are insets: `left` from the left edge of the drawing,
    │ │ a            │──┐  │      `right` from its right edge, so the drawing fits any width
    │ └──────┬───────┘  │  │
    │ ┌──────▼───────┐  │  │
    │ │ b            │  │  │
    │ └──────┬───────┘  │  │
    │ ┌──────▼───────┐  │  │
    │ │ c            │◀─┘  │
    │ └──────────────┘     │
    └──────────────────────┘
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.view.nesting import Node, nest

ROW = 42
HEAD = 44
GAP = 10
CUT_GAP = 26
"""Between neighbours, where a cut can be drawn."""
PAD = 8
INDENT = 12
LANE = 7
GUTTER = 63
"""Most pixels that the lanes of one box may take; beyond nine lanes they move closer."""


class Row(Record):
    """One box. An open container encloses its children; `height` includes them."""

    id: str
    name: str
    kind: str
    depth: int
    top: int
    height: int
    left: int
    right: int
    toggles: bool
    foldable: bool
    open: bool
    members: tuple[str, ...] = ()


class Link(Record):
    """Data that flows from one box to another; both stand in the same container."""

    source: str
    target: str
    n_bytes: int
    kind: Literal["next", "skip", "back"]
    top: int
    height: int
    inset: int
    """`next`: from the left. Else from the right, of the lane."""
    width: int = 0
    """From the boxes' right edge to the lane; 0 for `next`."""


class CutLine(Record):
    """A place between two neighbours where a pipeline could be split. `id` is `after>before`."""

    id: str
    after: str
    before: str
    top: int
    left: int
    right: int
    n_bytes: int
    refusal: str | None = None


class Layout(Record):
    """The whole drawing."""

    rows: tuple[Row, ...]
    links: tuple[Link, ...]
    cuts: tuple[CutLine, ...]
    height: int

    @cached_property
    def shape(self) -> str:
        """Changes when anything moves: the browser draws again only then."""
        return hashlib.sha256(msgspec.json.encode((self.rows, self.links, self.cuts))).hexdigest()[:12]


def layout(graph: ModelGraph, opened: Collection[str] = (), *, cuts: bool = False) -> Layout:
    """Places every block that is in view when the nodes in `opened` are unfolded."""
    nodes = nest(graph)
    drawing = _Drawing(graph, nodes, {id for id in opened if id in nodes and nodes[id].children} | {""}, cuts=cuts)
    bottom = drawing.place("", top=0, left=0, right=0)
    drawing.place_cuts()
    return Layout(rows=tuple(drawing.rows), links=tuple(drawing.links), cuts=tuple(drawing.cuts), height=bottom)


class _Drawing:
    """Grows while containers are placed, parents before children."""

    def __init__(self, graph: ModelGraph, nodes: dict[str, Node], opened: set[str], *, cuts: bool) -> None:
        self.graph = graph
        self.nodes = nodes
        self.opened = opened
        self.gap = CUT_GAP if cuts else GAP
        self.flows = _flows(graph, nodes, opened)
        self.cuts_wanted = cuts
        self.rows: list[Row] = []
        self.links: list[Link] = []
        self.cuts: list[CutLine] = []

    def place(self, parent: str, *, top: int, left: int, right: int, depth: int = 0) -> int:
        """Places the children of `parent` from `top` down; returns where the last one ends."""
        flows = self.flows.get(parent, {})
        order = ranked(self.nodes[parent].children, flows)
        at = {id: place for place, id in enumerate(order)}
        lanes = _lanes([(at[a], at[b]) for a, b in flows if abs(at[a] - at[b]) > 1 or at[b] < at[a]])
        n_lanes = max(lanes.values(), default=-1) + 1
        step = min(LANE, GUTTER // n_lanes) if n_lanes else 0
        inset = right + n_lanes * step
        where: dict[str, tuple[int, int]] = {}
        for id in order:
            if where:
                top += self.gap
            bottom = self._row(id, top=top, left=left, right=inset, depth=depth)
            where[id] = (top, bottom)
            top = bottom
        for (a, b), n_bytes in flows.items():
            lane = lanes.get((at[a], at[b]))
            self.links.append(_link(a, b, n_bytes, where, left, inset, None if lane is None else (lane + 1) * step))
        return top

    def _row(self, id: str, *, top: int, left: int, right: int, depth: int) -> int:
        node = self.nodes[id]
        is_open = id in self.opened
        index = len(self.rows)
        self.rows.append(_row_of(node, depth, top, left, right, is_open=is_open))
        if not is_open:
            return top + ROW
        bottom = self.place(id, top=top + HEAD, left=left + INDENT, right=right + PAD, depth=depth + 1) + PAD
        self.rows[index] = msgspec.structs.replace(self.rows[index], height=bottom - top)
        return bottom

    def place_cuts(self) -> None:
        """A cut is drawn where both of its blocks, or containers that end and begin there, are neighbours in view."""
        if not self.cuts_wanted:
            return
        rows = {row.id: row for row in self.rows}
        for cut in self.graph.cuts:
            pair = _siblings(cut.after, cut.before, self.nodes)
            if pair is None or pair[0] not in rows or pair[1] not in rows:
                continue
            above, below = rows[pair[0]], rows[pair[1]]
            bottom = above.top + above.height
            if not 0 < below.top - bottom <= self.gap:
                continue
            self.cuts.append(
                CutLine(
                    id=f"{cut.after}>{cut.before}",
                    after=cut.after,
                    before=cut.before,
                    top=(bottom + below.top) // 2,
                    left=above.left,
                    right=above.right,
                    n_bytes=cut.n_bytes,
                    refusal=cut.refusal,
                )
            )


def _row_of(node: Node, depth: int, top: int, left: int, right: int, *, is_open: bool) -> Row:
    return Row(
        id=node.id,
        name=node.name,
        kind=node.kind,
        depth=depth,
        top=top,
        height=ROW,
        left=left,
        right=right,
        toggles=node.toggles,
        foldable=bool(node.children),
        open=is_open,
        members=node.members,
    )


def _link(
    a: str, b: str, n_bytes: int, where: dict[str, tuple[int, int]], left: int, inset: int, reach: int | None
) -> Link:
    (top_a, bottom_a), (top_b, bottom_b) = where[a], where[b]
    if reach is None:
        return Link(
            source=a, target=b, n_bytes=n_bytes, kind="next", top=bottom_a, height=top_b - bottom_a, inset=left + 20
        )
    # Leaves low and arrives high, so that the two ends of one box stay apart.
    start, end = min(bottom_a, top_a + ROW) - 12, top_b + 12
    kind: Literal["skip", "back"] = "skip" if end > start else "back"
    return Link(
        source=a,
        target=b,
        n_bytes=n_bytes,
        kind=kind,
        top=min(start, end),
        height=abs(end - start),
        inset=inset - reach,
        width=reach,
    )


def _path(id: str, nodes: dict[str, Node]) -> list[str]:
    """From the model down to `id`."""
    path = [id]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _siblings(source: str, target: str, nodes: dict[str, Node]) -> tuple[str, str] | None:
    """The two children of the nearest common parent that hold both ends; None where one end holds the other."""
    if source not in nodes or target not in nodes:
        return None
    for a, b in zip(_path(source, nodes), _path(target, nodes)):
        if a != b:
            return a, b
    return None


def _flows(graph: ModelGraph, nodes: dict[str, Node], opened: set[str]) -> dict[str, dict[tuple[str, str], int]]:
    """For each open container, the bytes between its children.

    What passes through operations of the container itself (a residual addition) joins the nearest child that feeds
    them, in module order, with each child they feed.
    """
    flows: dict[str, dict[tuple[str, str], int]] = {}
    into: dict[str, list[str]] = {}
    out_of: dict[str, list[tuple[str, int]]] = {}
    for edge in graph.edges:
        if edge.source not in nodes or edge.target not in nodes or edge.source == edge.target:
            continue
        source, target = _path(edge.source, nodes), _path(edge.target, nodes)
        level = next((i for i, (a, b) in enumerate(zip(source, target)) if a != b), None)
        if level is not None:
            pair = (source[level], target[level])
            found = flows.setdefault(source[level - 1], {})
            found[pair] = found.get(pair, 0) + edge.n_bytes
        elif len(source) > len(target):
            into.setdefault(edge.target, []).append(source[len(target)])
        else:
            out_of.setdefault(edge.source, []).append((target[len(source)], edge.n_bytes))
    for parent, fed in out_of.items():
        place = {id: i for i, id in enumerate(nodes[parent].children)}
        for target_id, n_bytes in fed:
            before = [id for id in into.get(parent, ()) if id in place and place[id] < place[target_id]]
            if before:
                pair = (max(before, key=lambda id: place[id]), target_id)
                found = flows.setdefault(parent, {})
                found[pair] = max(found.get(pair, 0), n_bytes)
    return {parent: pairs for parent, pairs in flows.items() if parent in opened}


def ranked(children: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Kahn's order; module order breaks ties, and in a cycle the first that is left goes next."""
    place = {id: i for i, id in enumerate(children)}
    after: dict[str, list[str]] = {id: [] for id in children}
    waiting = dict.fromkeys(children, 0)
    for a, b in pairs:
        after[a].append(b)
        waiting[b] += 1
    ready = [place[id] for id in children if not waiting[id]]
    heapq.heapify(ready)
    order: list[str] = []
    left = dict.fromkeys(children)
    while left:
        id = children[heapq.heappop(ready)] if ready else next(iter(left))
        if id not in left:
            continue
        del left[id]
        order.append(id)
        for follower in after[id]:
            waiting[follower] -= 1
            if not waiting[follower] and follower in left:
                heapq.heappush(ready, place[follower])
    return order


def _lanes(spans: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A lane for each span so that no two in one lane touch; short spans stay near the boxes."""
    taken: list[list[tuple[int, int]]] = []
    lane_of: dict[tuple[int, int], int] = {}
    for span in sorted(spans, key=lambda span: (abs(span[1] - span[0]), min(span))):
        low, high = min(span), max(span)
        for lane, others in enumerate(taken):
            if all(high < a or b < low for a, b in others):
                break
        else:
            lane, others = len(taken), []
            taken.append(others)
        others.append((low, high))
        lane_of[span] = lane
    return lane_of
