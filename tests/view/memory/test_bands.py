"""The strip of phases: it covers the step once, hatched where blocks run again."""

from __future__ import annotations

from explorer.view.memory.timeline import timeline
from tests.view.builders import measured


def test_bands_cover_the_step_once_and_recompute_is_hatched() -> None:
    run = measured(recompute=[0, 2])
    strips = {trace.name: trace for trace in timeline(run).figure.data if trace.fillpattern.shape is not None}
    assert set(strips) == {span.phase for span in run.phases}
    width = 0.0
    for trace in strips.values():
        xs = [x for x in trace.x if x is not None]
        width += sum(xs[i + 1] - xs[i] for i in range(0, len(xs), 5))
    assert width == run.allocations.n_ticks
    assert strips["recompute"].fillpattern.shape == "/"
    assert strips["forward"].fillpattern.shape == ""


def test_hatched_phases_keep_their_colour() -> None:
    strip = next(trace for trace in timeline(measured(recompute=[1])).figure.data if trace.name == "recompute")
    assert strip.fillpattern.bgcolor == strip.fillcolor
