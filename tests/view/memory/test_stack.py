"""Areas on top of each other add up to the total at every drawn point."""

from __future__ import annotations

from explorer.view.drawing.axis import MAX_POINTS
from explorer.view.memory.stacked import roles
from tests.view.builders import Chain, measured
from tests.view.memory.stacks import assert_adds_up


def test_points_carry_their_tick() -> None:
    fig = roles(measured()).figure
    assert [point[1] for point in fig.data[-1].customdata] == list(fig.data[-1].x)


def test_bands_add_up_when_thinned() -> None:
    """All roles are drawn at the same ticks: each thinned on its own would add up to nothing that was ever held."""
    run = measured(Chain(n_blocks=200, n_parts=4), range(0, 200, 3))
    assert run.allocations.n_ticks > MAX_POINTS
    assert_adds_up(roles(run), run.step_peak_bytes)
