"""Names beside the marks of a scatter chart: each where it covers neither another name nor a mark, or nowhere.

Plotly writes a name where it is told and lets names run over each other. What finds no room is left to the hover.
"""

from __future__ import annotations

from collections.abc import Sequence

from explorer.record.base import Record

PLACES = (
    "top right", "bottom right", "top left", "bottom left", "top center", "bottom center", "middle right",
    "middle left",
)  # fmt: skip
"""Plotly's, the first that is free is taken."""
LETTER, LINE, MARK = 7, 16, 6
"""Pixels: width of a letter at 12 px, height of a line, half a mark."""
_PADDING = 0.12
"""Share of an axis beyond its outermost marks, on either side: room for their names."""

Rectangle = tuple[float, float, float, float]
"""left, right, bottom, top."""


class Plane(Record):
    """All marks of a chart, and the pixels that they are drawn in; a wider page leaves more room, not less."""

    marks: tuple[tuple[float, float], ...]
    width: int
    height: int

    def pixels(self, mark: tuple[float, float]) -> tuple[float, float]:
        """Where it stands, from the left and from below."""
        xs, ys = zip(*self.marks)
        return _along(mark[0], xs, self.width), _along(mark[1], ys, self.height)

    def ranges(self) -> tuple[list[float], list[float]]:
        """The ranges of the two axes, as `pixels` supposes them."""
        xs, ys = zip(*self.marks)
        return _range(xs), _range(ys)


def names_beside(named: Sequence[tuple[tuple[float, float], str]], plane: Plane) -> list[str]:
    """For each mark and its name one of PLACES, or the empty string where there is no room."""
    taken = [_around(mark, plane) for mark in plane.marks]
    places: list[str] = []
    for mark, name in named:
        own, (x, y) = _around(mark, plane), plane.pixels(mark)
        others = [box for box in taken if box != own]
        boxes = ((place, _rectangle(x, y, name, place)) for place in PLACES)
        place, box = next(((place, box) for place, box in boxes if _is_free(box, others, plane)), ("", None))
        places.append(place)
        if box is not None:
            taken.append(box)
    return places


def _around(mark: tuple[float, float], plane: Plane) -> Rectangle:
    x, y = plane.pixels(mark)
    return x - MARK, x + MARK, y - MARK, y + MARK


def _along(value: float, values: Sequence[float], pixels: int) -> float:
    least, most = min(values), max(values)
    share = (value - least) / (most - least) if most > least else 0.5
    return pixels * (_PADDING + (1 - 2 * _PADDING) * share)


def _range(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    beyond = (most - least or abs(most) or 1.0) * _PADDING / (1 - 2 * _PADDING)
    return [least - beyond, most + beyond]


def _rectangle(x: float, y: float, name: str, place: str) -> Rectangle:
    vertical, horizontal = place.split()
    width = LETTER * len(name)
    left = {"right": x + MARK, "left": x - MARK - width, "center": x - width / 2}[horizontal]
    bottom = {"top": y + MARK, "bottom": y - MARK - LINE, "middle": y - LINE / 2}[vertical]
    return left, left + width, bottom, bottom + LINE


def _is_free(box: Rectangle, taken: Sequence[Rectangle], plane: Plane) -> bool:
    left, right, bottom, top = box
    inside = left >= 0 and right <= plane.width and bottom >= 0 and top <= plane.height
    return inside and all(right <= a or b <= left or top <= c or d <= bottom for a, b, c, d in taken)
