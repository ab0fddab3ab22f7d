"""Where an event stands: phases on phases, the optimizer narrowed, and no time where nobody's clock was read."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from explorer.record import Measurement, Samples, Times
from explorer.record.base import column
from explorer.view.drawing.axis import OPTIMIZER_SHARE, axis_layout, event_ticks, has_times, positions
from tests.view.builders import Chain, measured

TIMED = Times(
    step=Samples(ms=(9.0, 10.0, 11.0)), forward=Samples(ms=(3.0,)), backward=Samples(ms=(6.0,)),
    optimizer=Samples(ms=(1.0,)), clock="wall",
)  # fmt: skip


def run(*, recompute: list[int] | None = None) -> Measurement:
    return measured(Chain(n_blocks=4), recompute=recompute or [])


def places(one: Measurement, drawn: Measurement, axis: str = "tick") -> np.ndarray:
    assert one.allocations is not None
    return positions(one, one.allocations, drawn, axis=axis)  # type: ignore[arg-type]


def borders(one: Measurement) -> dict[str, int]:
    return {span.phase: span.end_tick - 1 for span in one.phases if span.phase != "recompute"}


def test_every_event_keeps_its_order_and_the_optimizer_its_share() -> None:
    one = run()
    x = places(one, one)
    assert (np.diff(x) > 0).all() and x[0] == 0
    before, last = borders(one)["backward"], len(x) - 1
    events = last - before
    wide = before * OPTIMIZER_SHARE / (1 - OPTIMIZER_SHARE)
    assert x[-1] - x[before] == pytest.approx(min(events, wide)) and (x[before] == before)
    long = replace(one, phases=(*one.phases[:-1], replace(one.phases[-1], first_tick=10)))
    narrowed = places(long, long)
    assert (narrowed[-1] - narrowed[9]) / narrowed[-1] == pytest.approx(OPTIMIZER_SHARE)


def test_another_run_ends_forward_where_the_drawn_one_does() -> None:
    one, drawn = run(), run(recompute=[0, 1, 2, 3])
    own, onto = borders(one)["forward"], borders(drawn)["forward"]
    assert places(one, drawn)[own] == places(drawn, drawn)[onto]
    assert own != onto, "else nothing was stretched"


def test_in_time_the_step_lasts_as_long_as_the_median_step() -> None:
    one = replace(run(), times=TIMED)
    x = places(one, one, "time")
    assert x[-1] == 10.0 and (np.diff(x) >= 0).all()
    assert axis_layout("time", one, alone=True)["title"]["text"] == "time (ms)"
    untimed = replace(one, times=None)
    assert "recording included" in axis_layout("time", untimed, alone=True)["title"]["text"]


def test_there_is_no_time_where_a_run_has_none_or_was_only_played() -> None:
    one = run()
    assert one.allocations is not None and has_times(one) and has_times(one, None)
    bare = replace(one, allocations=replace(one.allocations, time_ns=column()))
    assert not has_times(bare) and not has_times(one, bare) and not has_times(None)
    assert not has_times(replace(one, origin="predicted")), "the clock was that of the player"


def test_labels_are_round_and_the_last_event_is_named() -> None:
    one = run()
    assert one.allocations is not None
    at, labels = event_ticks(one)
    assert at == sorted(at) and labels[0] == "0" and labels[-1] == f"{one.allocations.n_ticks:,}"
