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
from collections.abc import Collection
from functools import cached_property
from typing import Literal

import msgspec

from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.view.flow import flows, ranked, siblings
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
    note: str = ""
    """What stands on the line instead of the bytes of the whole batch."""


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
        self.flows = flows(graph, nodes, opened)
        self.cuts_wanted = cuts
        self.rows: list[Row] = []
        self.links: list[Link] = []
        self.cuts: list[CutLine] = []

    def place(self, parent: str, *, top: int, left: int, right: int, depth: int = 0) -> int:
        """Places the children of `parent` from `top` down; returns where the last one ends."""
        pairs = self.flows.get(parent, {})
        order = ranked(self.nodes[parent].children, pairs)
        at = {id: place for place, id in enumerate(order)}
        lanes = _lanes([(at[a], at[b]) for a, b in pairs if abs(at[a] - at[b]) > 1 or at[b] < at[a]])
        n_lanes = max(lanes.values(), default=-1) + 1
        step = min(LANE, GUTTER // n_lanes) if n_lanes else 0
        inset = right + n_lanes * step
        placed: dict[str, Row] = {}
        for id in order:
            if placed:
                top += self.gap
            placed[id] = self._row(id, top=top, left=left, right=inset, depth=depth)
            top += placed[id].height
        for (a, b), n_bytes in pairs.items():
            lane = lanes.get((at[a], at[b]))
            reach = 0 if lane is None else (lane + 1) * step
            self.links.append(_link(placed[a], placed[b], n_bytes, reach))
        return top

    def _row(self, id: str, *, top: int, left: int, right: int, depth: int) -> Row:
        node = self.nodes[id]
        row = Row(
            id=id,
            name=node.name,
            kind=node.kind,
            depth=depth,
            top=top,
            height=ROW,
            left=left,
            right=right,
            toggles=node.toggles,
            foldable=bool(node.children),
            open=id in self.opened,
            members=node.members,
        )
        index = len(self.rows)
        self.rows.append(row)
        if row.open:
            bottom = self.place(id, top=top + HEAD, left=left + INDENT, right=right + PAD, depth=depth + 1) + PAD
            self.rows[index] = row = msgspec.structs.replace(row, height=bottom - top)
        return row

    def place_cuts(self) -> None:
        """A cut is drawn where both of its blocks, or containers that end and begin there, are neighbours in view."""
        if not self.cuts_wanted:
            return
        rows = {row.id: row for row in self.rows}
        for cut in self.graph.cuts:
            pair = siblings(cut.after, cut.before, self.nodes)
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


def _link(a: Row, b: Row, n_bytes: int, reach: int) -> Link:
    """`reach`: pixels from the boxes' right edge to the lane; 0 between neighbours."""
    if not reach:
        top = a.top + a.height
        return Link(
            source=a.id, target=b.id, n_bytes=n_bytes, kind="next", top=top, height=b.top - top, inset=a.left + 20
        )
    # Leaves low and arrives high, so that the two ends of one box stay apart.
    start, end = a.top + min(a.height, ROW) - 12, b.top + 12
    return Link(
        source=a.id,
        target=b.id,
        n_bytes=n_bytes,
        kind="skip" if end > start else "back",
        top=min(start, end),
        height=abs(end - start),
        inset=a.right - reach,
        width=reach,
    )


def _lanes(spans: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A lane for each span so that no two in one lane touch; short spans stay near the boxes."""
    taken: list[list[tuple[int, int]]] = []
    lane_of: dict[tuple[int, int], int] = {}
    for span in sorted(spans, key=lambda span: (abs(span[1] - span[0]), min(span))):
        low, high = min(span), max(span)
        free = (i for i, others in enumerate(taken) if all(high < a or b < low for a, b in others))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        lane_of[span] = lane
    return lane_of
