"""Which runs are beaten: within their spread times are equal, and a wrong gradient is worth nothing."""

from __future__ import annotations

from explorer.view.compare.run_plane import TOO_FEW, UNSAFE, RunPoint, is_ahead, run_plane

MIB = 2**20


def point(peak: int, ms: float, *, verdict: str = "bitwise equal", conditions: str = "small, cpu") -> RunPoint:
    return RunPoint(
        name=f"{peak} in {ms}", policy="keep all", conditions=conditions, peak_bytes=peak * MIB, step_ms=ms,
        spread_ms=1.0, verdict=verdict,
    )  # fmt: skip


def ahead(*points: RunPoint) -> list[int]:
    return [place for place in range(len(points)) if is_ahead(points, place)]


def test_a_run_is_beaten_by_one_that_needs_neither_more_memory_nor_more_time() -> None:
    assert ahead(point(100, 50.0), point(60, 70.0), point(60, 80.0), point(70, 90.0)) == [0, 1]


def test_times_within_their_spread_are_equal() -> None:
    assert ahead(point(100, 50.0), point(60, 50.9)) == [1], "less memory in a time that cannot be told apart"
    assert ahead(point(60, 50.0), point(60, 50.9)) == [0, 1]


def test_runs_under_other_conditions_beat_nothing() -> None:
    assert ahead(point(100, 50.0), point(1, 1.0, conditions="gpu, cpu")) == [0, 1]


def test_a_wrong_gradient_is_on_no_front_and_beats_nothing() -> None:
    for verdict in UNSAFE:
        points = (point(100, 50.0), point(10, 10.0, verdict=verdict))
        assert ahead(*points) == [0]
        marks = run_plane(points, "gpt").figure.data[0]
        assert list(marks.marker.symbol) == ["circle", "x-thin"], "not told by colour alone"


def test_the_chart_says_its_answer_and_lists_every_run() -> None:
    chart = run_plane((point(100, 50.0), point(60, 70.0), point(70, 90.0)), "gpt")
    assert "2 of 3 runs beaten by none; least memory 60.0 MiB in 70.0 ms, measured" in chart.alt
    assert [row["on the front"] for row in chart.rows()] == ["yes", "yes", "no"]
    assert [custom[0] for custom in chart.figure.data[0].customdata] == [0, 1, 2]
    assert run_plane((point(1, 1.0),), "gpt").figure.layout.annotations[0].text == TOO_FEW
