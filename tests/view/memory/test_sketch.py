"""The sketch of a step shows its peak, every phase and no markup of anybody's names."""

from __future__ import annotations

import re

from explorer.view.memory.timeline import HEIGHT, sketch
from tests.view.builders import measured


def test_the_curve_touches_the_top_and_names_are_text() -> None:
    drawn = sketch(measured(recompute=range(2)), ["<b>peak</b>", "second"])
    assert "&lt;b&gt;peak" in drawn and "<script" not in drawn
    heights = [float(point.split(",")[1]) for point in re.search(r'points="([^"]*)"', drawn)[1].split()]  # type: ignore[index]
    assert min(heights) == 0 and max(heights) <= HEIGHT
    assert all(f"</span> {phase}" in drawn for phase in ("forward", "recompute", "backward"))
    assert len(drawn) < 20_000
