"""Arrows between the boxes in view, and the order of the boxes: the graph of all blocks, folded.

Folding is a quotient: a closed box stands for everything inside. A tensor that reaches several blocks inside crosses
the border once. A join that a single box in view feeds is left out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from msgspec.structs import replace

from explorer.record.base import Record
from explorer.record.graph import INPUT, Edge, Join, ModelGraph
from explorer.view.graph.nesting import Node


class Arrow(Record):
    """Tensors that flow between two boxes in view, each tensor counted once."""

    source: str
    target: str
    n_bytes: int
    n_tensors: int
    back: bool


class Flow(Record):
    """Arrows between closed boxes and joins of open boxes in view."""

    arrows: tuple[Arrow, ...]
    paths: Mapping[str, tuple[str, ...]]
    """Path from the model down to each node and each join in view."""
    joins: Mapping[str, tuple[Join, ...]]
    """Joins in view, by the block around them."""

    @cached_property
    def lifted(self) -> dict[str, list[tuple[str, str]]]:
        """The forward arrows between the children of each open box."""
        arrows_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for arrow in self.arrows:
            pair = self.siblings(arrow.source, arrow.target)
            if pair is not None and not arrow.back:
                arrows_of[self.paths[pair[0]][-2]].append(pair)
        return arrows_of

    def siblings(self, source: str, target: str) -> tuple[str, str] | None:
        """The two children of the nearest common parent that hold both ends; None if one end contains the other."""
        return next(((a, b) for a, b in zip(self.paths[source], self.paths[target]) if a != b), None)

    def common(self, source: str, target: str) -> str:
        """The innermost box that holds both."""
        path = [a for a, b in zip(self.paths[source], self.paths[target]) if a == b]
        return path[-1]


_GIVEN = Join(id=INPUT, block="", op="input")
"""Join where the inputs of the model enter the drawing."""


def folded(graph: ModelGraph, nodes: Mapping[str, Node], opened: Collection[str]) -> Flow:
    """The arrows in view when `opened` (the model itself among them) are unfolded."""
    paths = _paths(graph, nodes)
    shown = {id: next((step for step in path if step not in opened), id) for id, path in paths.items()}
    ways: dict[tuple[str, str], dict[int, Edge]] = defaultdict(dict)
    for number, edge in enumerate(graph.edges):
        if edge.source not in shown or edge.target not in shown:
            continue
        source, target = shown[edge.source], shown[edge.target]
        apart = any(a != b for a, b in zip(paths[source], paths[target]))
        if apart:
            tensor = edge.data if edge.data is not None else -1 - number
            first = ways[source, target].setdefault(tensor, edge)
            if first.n_bytes < edge.n_bytes:
                ways[source, target][tensor] = edge
    joins = {join.id: join for join in graph.joins if shown.get(join.id) == join.id}
    _dissolve(joins, ways)
    if any(source == INPUT for source, _ in ways):
        joins = {INPUT: _GIVEN, **joins}
    by_block: dict[str, list[Join]] = defaultdict(list)
    for join in joins.values():
        by_block[join.block].append(join)
    return Flow(
        arrows=tuple(_arrow(source, target, way) for (source, target), way in ways.items()),
        paths=paths,
        joins={block: tuple(inside) for block, inside in by_block.items()},
    )


def _paths(graph: ModelGraph, nodes: Mapping[str, Node]) -> dict[str, tuple[str, ...]]:
    paths: dict[str, tuple[str, ...]] = {}
    for id, node in nodes.items():  # parents come before children
        paths[id] = (*(paths[node.parent] if node.parent is not None else ()), id)
    for join in (_GIVEN, *graph.joins):
        if join.block in paths:
            paths[join.id] = (*paths[join.block], join.id)
    return paths


def _arrow(source: str, target: str, way: Mapping[int, Edge]) -> Arrow:
    return Arrow(
        source=source,
        target=target,
        n_bytes=sum(edge.n_bytes for edge in way.values()),
        n_tensors=sum(edge.n_tensors for edge in way.values()),
        back=all(edge.back for edge in way.values()),
    )


def _dissolve(joins: dict[str, Join], ways: dict[tuple[str, str], dict[int, Edge]]) -> None:
    """Removes each join that fewer than two boxes in view feed; its arrows then start at the box that feeds it."""
    while True:
        feeding: dict[str, list[str]] = {id: [] for id in joins}
        for source, target in ways:
            if target in feeding:
                feeding[target].append(source)
        gone = next((id for id, sources in feeding.items() if len(sources) < 2), None)
        if gone is None:
            return
        del joins[gone]
        for (_, target), way in [item for item in ways.items() if item[0][0] == gone]:
            del ways[gone, target]
            for source in feeding[gone]:
                if source != target:
                    back = all(edge.back for edge in ways[source, gone].values())
                    passed = {n: replace(edge, back=back or edge.back) for n, edge in way.items()}
                    ways[source, target] = {**passed, **ways.get((source, target), {})}
        for source in feeding[gone]:
            del ways[source, gone]


def ordered(flow: Flow, nodes: Mapping[str, Node], opened: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Children and joins of each open box, top to bottom."""
    order = {}
    for id in nodes:
        if id in opened:
            joins = [join.id for join in flow.joins.get(id, ())]
            order[id] = tuple(ranked([*joins, *nodes[id].children], flow.lifted.get(id, ())))
    return order


def ranked(children: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Kahn's order. The input order breaks ties; in a cycle the first remaining node goes next."""
    place = {id: i for i, id in enumerate(children)}
    after: dict[str, list[str]] = {id: [] for id in children}
    waiting = dict.fromkeys(children, 0)
    for a, b in dict.fromkeys(pairs):
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


LANE = 9
GUTTER = 63
"""Most pixels that the lanes of one box may take; beyond that they move closer."""
K = TypeVar("K")
Span = tuple[int, int]


class Ways(Record):
    """Routes of the arrows of a drawing."""

    neighbours: frozenset[Arrow]
    """Arrows to the box right below."""
    lanes: Mapping[str, Mapping[str, int]]
    """Lanes by open box and by sender inside the box, for arrows past a neighbour; lane 0 is the innermost."""

    def gutter(self, box: str) -> int:
        """Pixels that the lanes of `box` take."""
        return self._n_lanes(box) * self._step(box)

    def inset(self, box: str, source: str) -> int:
        """Distance from the right border of `box` to the lane of `source`."""
        return self.gutter(box) - (self.lanes[box][source] + 1) * self._step(box) + self._step(box) // 2

    def _n_lanes(self, box: str) -> int:
        return max(self.lanes.get(box, {}).values(), default=-1) + 1

    def _step(self, box: str) -> int:
        return min(LANE, GUTTER // max(self._n_lanes(box), 1))


def ways_of(flow: Flow, order: Mapping[str, Sequence[str]]) -> Ways:
    """`order`: content of each open box, top to bottom."""
    ends = {end for arrow in flow.arrows for end in (arrow.source, arrow.target)}
    place = {id: i for i, id in enumerate(_down(order, "", ends))}
    neighbours = set()
    spans: dict[str, dict[str, Span]] = {}
    for arrow in flow.arrows:
        start, end = place[arrow.source], place[arrow.target]
        if end == start + 1:
            neighbours.add(arrow)
            continue
        box = spans.setdefault(flow.common(arrow.source, arrow.target), {})
        low, high = box.get(arrow.source, (start, start))
        box[arrow.source] = min(low, end), max(high, end)
    return Ways(neighbours=frozenset(neighbours), lanes={box: lanes(box_spans) for box, box_spans in spans.items()})


def _down(order: Mapping[str, Sequence[str]], box: str, ends: Collection[str]) -> list[str]:
    """Closed boxes and joins from top to bottom. An open box stands before its content if an arrow ends at the box."""
    path: list[str] = []
    for id in order[box]:
        if id not in order or id in ends:
            path.append(id)
        if id in order:
            path += _down(order, id, ends)
    return path


def lanes(spans: Mapping[K, Span]) -> dict[K, int]:
    """A lane for each span so that no two in one lane touch; short spans stay near the boxes."""
    lanes_used: list[list[Span]] = []
    lane_of: dict[K, int] = {}
    for key, (low, high) in sorted(spans.items(), key=lambda item: (item[1][1] - item[1][0], item[1][0])):
        free = (i for i, others in enumerate(lanes_used) if all(high < a or b < low for a, b in others))
        lane = next(free, len(lanes_used))
        if lane == len(lanes_used):
            lanes_used.append([])
        lanes_used[lane].append((low, high))
        lane_of[key] = lane
    return lane_of
