"""Which arrow runs where: through the gap to its neighbour, or through a lane in the gutter of the box around it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from explorer.record.base import Record
from explorer.view.graph.flow import Arrow, Flow

LANE = 9
GUTTER = 63
"""Most pixels that the lanes of one box may take; beyond that they move closer."""
K = TypeVar("K")
Span = tuple[int, int]


class Ways(Record):
    """Where each arrow of a drawing runs."""

    neighbours: frozenset[Arrow]
    """Arrows to what stands right below."""
    lanes: Mapping[str, Mapping[str, int]]
    """For each open box the lane of everything within that sends something past its neighbour; 0 is the innermost."""

    def gutter(self, box: str) -> int:
        """Pixels that the lanes of `box` take."""
        return self._n_lanes(box) * self._step(box)

    def inset(self, box: str, source: str) -> int:
        """From the right border of `box` to the lane of `source`."""
        return self.gutter(box) - (self.lanes[box][source] + 1) * self._step(box) + self._step(box) // 2

    def _n_lanes(self, box: str) -> int:
        return max(self.lanes.get(box, {}).values(), default=-1) + 1

    def _step(self, box: str) -> int:
        return min(LANE, GUTTER // max(self._n_lanes(box), 1))


def ways_of(flow: Flow, order: Mapping[str, Sequence[str]]) -> Ways:
    """`order`: what lies in each open box, top to bottom."""
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
    """Closed boxes and joins from top to bottom; of open boxes those that an arrow ends at, before what is in them."""
    path: list[str] = []
    for id in order[box]:
        if id not in order or id in ends:
            path.append(id)
        if id in order:
            path += _down(order, id, ends)
    return path


def lanes(spans: Mapping[K, Span]) -> dict[K, int]:
    """A lane for each span so that no two in one lane touch; short spans stay near the boxes."""
    taken: list[list[Span]] = []
    lane_of: dict[K, int] = {}
    for key, (low, high) in sorted(spans.items(), key=lambda item: (item[1][1] - item[1][0], item[1][0])):
        free = (i for i, others in enumerate(taken) if all(high < a or b < low for a, b in others))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        lane_of[key] = lane
    return lane_of
