"""No name covers another or a mark, wherever the marks stand."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from explorer.view.compare.front import LETTER, LINE, MARK, PLACES, Plane, Rectangle, names_beside

WIDTH, HEIGHT = 460, 190
SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1))


def rectangle(x: float, y: float, name: str, place: str) -> Rectangle:
    """Where Plotly writes it."""
    vertical, horizontal = place.split()
    width = LETTER * len(name)
    left = x + MARK if horizontal == "right" else x - MARK - width if horizontal == "left" else x - width / 2
    bottom = y + MARK if vertical == "top" else y - MARK - LINE if vertical == "bottom" else y - LINE / 2
    return left, left + width, bottom, bottom + LINE


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


@given(st.lists(SHARES, min_size=1, max_size=9), st.lists(SHARES, max_size=9))
def test_names_never_meet(named: list[tuple[float, float]], others: list[tuple[float, float]]) -> None:
    plane = Plane(marks=(*named, *others), width=WIDTH, height=HEIGHT)
    names = ["Recompute all", "√n", "Every second"] * 3
    places = names_beside(list(zip(named, names)), plane)
    assert len(places) == len(named) and set(places) <= {*PLACES, ""}
    written = [rectangle(*plane.pixels(mark), name, where) for mark, name, where in zip(named, names, places) if where]
    assert not any(overlap(a, b) for a, b in combinations(written, 2))
    for box in written:
        assert box[0] >= 0 and box[1] <= WIDTH and box[2] >= 0 and box[3] <= HEIGHT


def test_what_has_room_is_named() -> None:
    apart = [((0.0, 1.0), "all"), ((1.0, 0.0), "every-2")]
    assert all(names_beside(apart, Plane(marks=((0.0, 1.0), (1.0, 0.0)), width=WIDTH, height=HEIGHT)))
    alone = ((5.0, 1.0), "all")
    assert names_beside([alone], Plane(marks=(alone[0],), width=WIDTH, height=HEIGHT)) == ["top right"]


def test_many_marks_at_one_place_are_not_all_named() -> None:
    crowd = [((1.0, 1.0), "Recompute all")] * 12
    places = names_beside(crowd, Plane(marks=tuple(mark for mark, _ in crowd), width=WIDTH, height=HEIGHT))
    assert "" in places and any(places)
