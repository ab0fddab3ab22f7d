"""Arrows that pass others by run in lanes, no two of one lane touching, however many there are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from explorer.view.graph.flow import GUTTER, lanes
from explorer.view.graph.geometry import layout
from tests import graphs


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda pair: pair[0] != pair[1]), unique=True))
def test_spans_in_one_lane_do_not_touch(spans: list[tuple[int, int]]) -> None:
    lane_of = lanes({span: (min(span), max(span)) for span in spans})
    assert set(lane_of) == set(spans)
    for one, other in itertools.combinations(spans, 2):
        if lane_of[one] == lane_of[other]:
            assert max(one) < min(other) or max(other) < min(one)


def test_skips_of_a_unet_each_have_a_lane() -> None:
    drawing = layout(graphs.unet(4))
    skips = [link for link in drawing.links if link.kind == "skip"]
    # down3 -> up3 passes the bottom only; the four skips enclose each other.
    assert len(skips) == 4
    assert len({link.lane for link in skips}) == 4
    assert all(link.kind != "back" for link in drawing.links)
    neighbours = [link for link in drawing.links if link.kind == "next"]
    assert len(neighbours) == len(drawing.rows) - 1


def test_many_lanes_share_the_gutter() -> None:
    drawing = layout(graphs.unet(20))
    assert max(row.right for row in drawing.rows) <= GUTTER
