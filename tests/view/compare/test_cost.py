"""Cost: FLOPs exact, time with its spread, and no ranking inside the noise."""

from __future__ import annotations

import msgspec
import pytest

from explorer.record import Comparison, Samples, Times
from explorer.view.compare.cost import (
    recompute_cost,
    recompute_time,
    step_time,
    time_answer,
)
from tests.view.builders import compared


def with_steps(pair: Comparison, *, baseline: tuple[float, ...], candidate: tuple[float, ...]) -> Comparison:
    runs = {"baseline": (pair.baseline, baseline), "candidate": (pair.candidate, candidate)}
    return msgspec.structs.replace(
        pair,
        **{
            name: msgspec.structs.replace(run, times=Times(clock="process CPU time", step=Samples(ms=ms)))
            for name, (run, ms) in runs.items()
        },
    )


def test_bars_are_the_counted_flops() -> None:
    pair = compared(recompute=[0, 3])
    bars = {trace.name: trace for trace in recompute_cost(pair).figure.data}
    assert sum(bars["forward"].x) * 1e9 == pair.candidate.forward_flops
    assert sum(bars["recompute"].x) * 1e9 == pair.candidate.recompute_flops == 1_500_000_000
    assert [x > 0 for x in bars["recompute"].x][:4] == [True, False, False, True]
    assert sum(bars["skipped by early stop"].x) * 1e9 == 500_000_000
    assert bars["recompute"].marker.pattern.shape == "/"


def test_the_answer_is_the_ratio_of_the_whole_step() -> None:
    assert recompute_cost(compared(recompute=range(6))).figure.layout.title.subtitle.text == "+25 % FLOPs in the step"
    assert recompute_cost(compared(recompute=[])).figure.layout.title.subtitle.text == "0.0 % more FLOPs in the step"


def test_times_have_error_bars() -> None:
    for trace in recompute_time(compared()).figure.data:
        assert len(trace.error_x.array) == len(trace.x)
        assert all(spread > 0 for spread, ms in zip(trace.error_x.array, trace.x) if ms)


def test_a_difference_inside_the_noise_is_not_ranked() -> None:
    pair = with_steps(compared(), baseline=(10, 12, 11, 10, 12), candidate=(11, 12, 10, 12, 11))
    assert time_answer(pair).endswith("; the difference is inside the noise")
    assert "x" not in time_answer(pair)


def test_a_difference_beyond_it_is_a_ratio_with_its_spread() -> None:
    pair = with_steps(compared(), baseline=(10, 10.1, 9.9), candidate=(12, 12.2, 11.8))
    assert time_answer(pair) == "10.00 ± 0.05 ms to 12.0 ± 0.1 ms a step, ×1.20 ± 0.00"


def test_every_timed_step_is_a_dot() -> None:
    pair = compared()
    for trace, run in zip(step_time(pair).figure.data, (pair.baseline, pair.candidate)):
        assert tuple(trace.x) == run.times.step.ms


def test_table_twin_is_exact() -> None:
    pair = compared(recompute=[2])
    table = {row["block"]: row for row in recompute_cost(pair).rows()}
    assert table["layers.2"]["recompute (FLOP)"] == 750_000_000
    assert table["layers.2"]["skipped by early stop (FLOP)"] == 250_000_000
    times = {row["block"]: row for row in recompute_time(pair).rows()}
    assert times["layers.1"]["recompute"] == "not run"
    assert [row["step (ms)"] for row in step_time(pair).rows() if row["run"] == "candidate"] == list(
        pair.candidate.times.step.ms
    )
    assert table["(whole model)"]["forward (FLOP)"] == pair.candidate.forward_flops


@pytest.mark.parametrize("chart", [recompute_time, step_time])
def test_not_measured_is_said(chart: object) -> None:
    pair = compared()
    bare = {
        name: msgspec.structs.replace(run, times=None, blocks=())
        for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate))
    }
    pair = msgspec.structs.replace(pair, **bare)
    assert "not measured" in chart(pair).figure.layout.annotations[0].text  # type: ignore[operator]
    assert "not measured" in recompute_cost(pair).figure.layout.annotations[0].text
    assert "step time not measured" in chart(pair).alt  # type: ignore[operator]


def test_hatching_keeps_the_colour_below_it() -> None:
    """Plotly's default draws lines on nothing, and a theme may set it; then the recompute bars look empty."""
    recompute = next(trace for trace in recompute_cost(compared()).figure.data if trace.name == "recompute")
    assert recompute.marker.pattern.fillmode == "overlay"
