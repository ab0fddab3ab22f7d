"""Positions of blocks, arrows and possible cuts in the drawing: records in, records out, in pixels.

Data flows from top to bottom. An arrow to the box right below is drawn in the gap. Every other arrow runs through a
lane, in the gutter at the right of the innermost box around both ends. Each box has one lane for all its arrows.

    ┌ block ───────────────┐
    │ ┌──────────────┐     │      horizontal positions are insets: `left` from the left edge of the drawing,
    │ │ a            │──┐  │      all others from its right edge, so the drawing fits any width
    │ └──────┬───────┘  │  │
    │ ┌──────▼───────┐  │  │
    │ │ b            │  │  │
    │ └──────┬───────┘  │  │
    │        ▼          │  │
    │       (+)   ◀─────┘  │      a join: the block itself adds a and b
    └──────────────────────┘
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from typing import Literal

import msgspec
from msgspec.structs import replace

from explorer.plan.names import above
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.view.graph.flow import Arrow, Flow, Ways, folded, ordered, ways_of
from explorer.view.graph.nesting import Node, nest

ROW = 42
HEAD = 44
JOIN = 18
GAP = 10
CUT_GAP = 26
"""Gap between neighbours with room for a cut."""
PAD = 8
INDENT = 12
SIGNS = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}
"""Signs of joins; all other operators are written out."""


class BlockRow(Record):
    """A box. An open container encloses its children; `height` includes the children."""

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
    n_calls: int = 1
    """Calls of the block, or of each member."""
    n_inside: int = 0
    """Blocks that presets count, below this one."""


class JoinMark(Record):
    """A mark where an open box brings data together."""

    id: str
    block: str
    op: str
    top: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return JOIN

    @property
    def sign(self) -> str:
        return SIGNS.get(self.op, self.op)


class Link(Record):
    """An arrow. `start` and `end` are heights; `source_right` and `target_right` are the edges of the joined boxes."""

    source: str
    target: str
    n_bytes: int
    n_tensors: int
    kind: Literal["next", "skip", "back"]
    start: int
    end: int
    lane: int
    """`next`: from the left. Else from the right, of the lane."""
    source_right: int = 0
    target_right: int = 0


class CutLine(Record):
    """A place between two neighbours where a pipeline could be split. `id` is `after>before`."""

    id: str
    top: int
    left: int
    right: int
    n_bytes: int
    refusal: str | None = None
    note: str = ""
    """Text on the line instead of the bytes of the whole batch."""


class Layout(Record):
    """The whole drawing."""

    rows: tuple[BlockRow, ...]
    joins: tuple[JoinMark, ...]
    links: tuple[Link, ...]
    cuts: tuple[CutLine, ...]
    height: int

    @cached_property
    def shape(self) -> str:
        """Changes when anything moves: the browser draws again only then."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def layout(graph: ModelGraph, opened: Collection[str] = (), *, cuts: bool = False) -> Layout:
    """Positions of all blocks in view while the nodes in `opened` are unfolded."""
    nodes = nest(graph)
    drawing = _Drawing(graph, nodes, {id for id in opened if id in nodes and nodes[id].children} | {""}, cuts=cuts)
    bottom = drawing.place("", top=0, left=0, right=0)
    drawing.place_links()
    drawing.place_cuts()
    return Layout(
        rows=tuple(drawing.rows),
        joins=tuple(drawing.joins),
        links=tuple(drawing.links),
        cuts=tuple(drawing.cuts),
        height=bottom,
    )


class _Drawing:
    """Grows while containers are placed, parents before children."""

    def __init__(self, graph: ModelGraph, nodes: dict[str, Node], opened: set[str], *, cuts: bool) -> None:
        self.graph = graph
        self.nodes = nodes
        self.opened = opened
        self.gap = CUT_GAP if cuts else GAP
        self.flow: Flow = folded(graph, nodes, opened)
        self.order = ordered(self.flow, nodes, opened)
        self.ways: Ways = ways_of(self.flow, self.order)
        self.cuts_wanted = cuts
        self.n_inside = Counter(holder for fqn in graph.repeats for holder in above(fqn) if holder)
        self.rows: list[BlockRow] = []
        self.joins: list[JoinMark] = []
        self.links: list[Link] = []
        self.cuts: list[CutLine] = []

    def place(self, parent: str, *, top: int, left: int, right: int, depth: int = 0) -> int:
        """Places the content of `parent` from `top` down; returns the bottom of the last item."""
        inset = right + self.ways.gutter(parent)
        joins = {join.id: join for join in self.flow.joins.get(parent, ())}
        for i, id in enumerate(self.order[parent]):
            top += self.gap if i else 0
            if id in joins:
                join = joins[id]
                self.joins.append(JoinMark(id=id, block=join.block, op=join.op, top=top, left=left, right=inset))
                top += JOIN
            else:
                top += self._row(id, top=top, left=left, right=inset, depth=depth).height
        return top

    def _row(self, id: str, *, top: int, left: int, right: int, depth: int) -> BlockRow:
        node = self.nodes[id]
        block = self.graph.by_fqn.get(node.members[0] if node.members else id)
        row = BlockRow(
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
            n_calls=block.n_calls if block else 1,
            n_inside=self.n_inside[id],
        )
        index = len(self.rows)
        self.rows.append(row)
        if row.open:
            bottom = self.place(id, top=top + HEAD, left=left + INDENT, right=right + PAD, depth=depth + 1) + PAD
            self.rows[index] = row = replace(row, height=bottom - top)
        return row

    def place_links(self) -> None:
        placed: dict[str, BlockRow | JoinMark] = {row.id: row for row in self.rows}
        placed |= {mark.id: mark for mark in self.joins}
        for arrow in self.flow.arrows:
            a, b = placed[arrow.source], placed[arrow.target]
            if arrow in self.ways.neighbours:
                pair = self.flow.siblings(arrow.source, arrow.target)
                assert pair is not None  # `folded` leaves out arrows from a box into itself
                self.links.append(_next(arrow, placed[pair[0]], placed[pair[1]]))
            else:
                box = self.flow.common(arrow.source, arrow.target)
                border = placed[box].right + PAD if box else 0
                self.links.append(_beside(arrow, a, b, border + self.ways.inset(box, arrow.source)))

    def place_cuts(self) -> None:
        """Places a cut if both of its blocks, or containers that end and begin there, are neighbours in view."""
        if not self.cuts_wanted:
            return
        rows = {row.id: row for row in self.rows}
        neighbours = set()
        for order in self.order.values():
            boxes = [id for id in order if id in rows]
            neighbours |= set(zip(boxes, boxes[1:]))
        for cut in self.graph.cuts:
            drawn = cut.after in self.flow.paths and cut.before in self.flow.paths
            pair = self.flow.siblings(cut.after, cut.before) if drawn else None
            if pair is None or pair not in neighbours:
                continue
            id, below, top = f"{cut.after}>{cut.before}", rows[pair[1]], rows[pair[1]].top - self.gap // 2
            self.cuts.append(
                CutLine(id=id, top=top, left=below.left, right=below.right, n_bytes=cut.n_bytes, refusal=cut.refusal)
            )


def _next(arrow: Arrow, above: BlockRow | JoinMark, below: BlockRow | JoinMark) -> Link:
    start, lane = above.top + above.height, max(above.left, below.left) + 20
    return Link(source=arrow.source, target=arrow.target, n_bytes=arrow.n_bytes, n_tensors=arrow.n_tensors,
                kind="next", start=start, end=below.top, lane=lane)  # fmt: skip


def _beside(arrow: Arrow, a: BlockRow | JoinMark, b: BlockRow | JoinMark, lane: int) -> Link:
    # Leaves low and arrives high, so that the two ends of one box stay apart.
    start, end = a.top + min(a.height, ROW) * 5 // 7, b.top + min(b.height, ROW) * 2 // 7
    return Link(source=a.id, target=b.id, n_bytes=arrow.n_bytes, n_tensors=arrow.n_tensors,
                kind="back" if arrow.back else "skip", start=start, end=end, lane=lane,
                source_right=a.right, target_right=b.right)  # fmt: skip


class Window(Record):
    """The browser window that a page is laid out for."""

    height: int
    """Pixels."""
    narrow: bool
    """Whether there is no room for two columns."""
    known: bool
    """False: the window is a guess."""
