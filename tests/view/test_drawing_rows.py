"""Rows of blocks, colours and units."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import replace

from explorer.plan.names import is_within
from explorer.record import PHASES, ROLES, Measurement, Policy, RunSpec, Samples, Times, Verdict
from explorer.record.base import column
from explorer.view.drawing import colours
from explorer.view.drawing.axis import axis_layout, event_ticks, has_times, minmax, positions
from explorer.view.drawing.colours import QUIET_TEXT
from explorer.view.drawing.figure import BarSeries, add_bars, bold, empty, figure, mark_cursor, readable
from explorer.view.drawing.rows import MAX_ROWS, block_names, chart_rows, row_sum, rows_of
from explorer.view.drawing.units import byte_axis, change, count, flop_axis, flops, mib, milliseconds, percent
from tests import graphs
from tests.graphs import GRAPH
from tests.view.builders import Chain, measured

names = st.sampled_from(["a", "b", "0", "1", "2", "layer1", "encoder_layer_0", "conv"])
trees = st.lists(st.lists(names, min_size=1, max_size=4).map(".".join), max_size=40)


def closed(fqns: list[str]) -> list[str]:
    """With all ancestors in front, as a module lists them."""
    return list(dict.fromkeys(".".join(f.split(".")[:i]) for f in fqns for i in range(len(f.split(".")) + 1) if f))


@given(trees)
def test_each_leaf_is_in_exactly_one_row(fqns: list[str]) -> None:
    tree = closed(fqns)
    rows = rows_of(tree).rows
    leaves = [fqn for fqn in tree if fqn and not any(other.startswith(f"{fqn}.") for other in tree)]
    for leaf in leaves:
        assert sum(is_within(leaf, fqn) for row in rows for fqn in row.fqns) == 1


@given(trees)
def test_index_finds_the_row_that_covers(fqns: list[str]) -> None:
    tree = closed(fqns)
    rows = rows_of(tree)
    for fqn in tree:
        i = rows.index(fqn)
        covers = [j for j, row in enumerate(rows.rows) if any(is_within(fqn, top) for top in row.fqns)]
        assert ([i] if i >= 0 else []) == covers


def test_rows_are_blocks_and_two_hundred_blocks_share_rows_in_order() -> None:
    tree = ["", "embedding", "blocks"]
    tree += [f"blocks.{i}{part}" for i in range(12) for part in ("", ".attention", ".mlp")]
    labels = [row.label for row in rows_of([*tree, "norm", "head"]).rows]
    assert labels == ["embedding", *(f"blocks.{i}" for i in range(12)), "norm", "head"]
    resnet = ["", "conv1", *(f"layer{i}{part}" for i in range(1, 4) for part in ("", ".0", ".0.conv", ".1", ".1.conv"))]
    labels = [row.label for row in rows_of(resnet).rows]
    assert labels == ["conv1", *(f"layer{i}.{j}" for i in range(1, 4) for j in range(2))]
    tree = ["", "embedding", "blocks", *(f"blocks.{i}" for i in range(200)), "head"]
    rows = rows_of(tree).rows
    assert len(rows) <= MAX_ROWS
    assert [fqn for row in rows for fqn in row.fqns] == ["embedding", *(f"blocks.{i}" for i in range(200)), "head"]
    assert rows[1].label == "blocks.0 to blocks.9"


def test_rows_sum_up_what_their_blocks_cost() -> None:
    run = graphs.measured(GRAPH, RunSpec(model=GRAPH.model, policy=Policy()))
    names = block_names(run, run)
    assert names == [cost.fqn for cost in run.blocks]
    rows = chart_rows(run)
    for row in rows:
        expected = sum(run.by_fqn[fqn].saved_after_forward_bytes for fqn in row.fqns)
        assert row_sum(run, row, "saved_after_forward_bytes") == expected
    unmeasured = graphs.measured(graphs.gpt(1), RunSpec(model=GRAPH.model))
    far = next(row for row in rows if row.fqns == ("blocks.5",))
    assert row_sum(unmeasured, far, "saved_after_forward_bytes") == 0


# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
EYES = {
    "full colour": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
EVERY = {
    **{f"role {name}": value for name, value in colours.ROLE_COLOURS.items()},
    **{f"phase {name}": value for name, value in colours.PHASE_COLOURS.items()},
    **{f"verdict {name}": value for name, value in colours.VERDICT_COLOURS.items()},
    **{f"run {name}": value for name, value in colours.RUN_COLOURS.items()},
    **{f"stage {j}": value for j, value in enumerate(colours.STAGE_COLOURS)},
}


def contrast(colour: str, other: str) -> float:
    """Contrast ratio of two `#RRGGBB` colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    darker, lighter = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (colour, other))
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_stands_out_from_both_pages() -> None:
    for name, page in itertools.product(EVERY, (colours.LIGHT_PAGE, colours.DARK_PAGE)):
        assert contrast(EVERY[name], page) >= 3.0, (name, page)


def test_two_roles_differ_by_pattern_or_to_every_eye() -> None:
    for eye, matrix in EYES.items():
        seen = {role: oklab(matrix @ linear(colour)) for role, colour in colours.ROLE_COLOURS.items()}
        for one, other in itertools.combinations(ROLES, 2):
            if colours.ROLE_PATTERNS[one] == colours.ROLE_PATTERNS[other]:
                assert np.linalg.norm(seen[one] - seen[other]) > 0.08, (one, other, eye)
    red, green = (EYES["deuteranopia"] @ linear(c) for c in ("#B4543C", "#7F7030"))
    assert np.linalg.norm(oklab(red) - oklab(green)) < 0.08, "else the test cannot fail"
    assert len({(colours.stage_colour(j), colours.stage_pattern(j)) for j in range(40)}) == 40


def test_the_stages_of_a_usual_split_wear_no_colour_of_a_phase() -> None:
    for stage, phase in itertools.product(range(6), ("forward", "backward", "recompute")):
        one, other = colours.stage_colour(stage), colours.PHASE_COLOURS[phase]
        assert np.linalg.norm(oklab(linear(one)) - oklab(linear(other))) > 0.1, (stage, phase)


def test_every_text_reaches_four_and_a_half_to_one() -> None:
    assert contrast(colours.QUIET_TEXT["light"], colours.LIGHT_PAGE) >= 4.5
    assert contrast(colours.QUIET_TEXT["dark"], colours.DARK_PAGE) >= 4.5
    for ground in (colours.RECOMPUTE, colours.VERDICT_COLOURS["different"]):
        assert contrast("#FFFFFF", ground) >= 4.5, "the words on a recomputed block and on a refusal are white"


def test_nothing_is_unnamed() -> None:
    assert set(colours.ROLE_COLOURS) == set(colours.ROLE_PATTERNS) == set(ROLES)
    assert set(colours.PHASE_COLOURS) == set(colours.PHASE_PATTERNS) == set(PHASES)
    assert set(colours.VERDICT_COLOURS) == set(colours.VERDICT_SYMBOLS) == set(get_args(Verdict))
    assert colours.ROLE_COLOURS["recomputed"] == colours.PHASE_COLOURS["recompute"] == colours.RECOMPUTE
    assert colours.ROLE_PATTERNS["recomputed"] == colours.PHASE_PATTERNS["recompute"] == "/"
    assert list(colours.ROLE_PATTERNS.values()).count("/") == 1


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson 2020: distances in this space are near to what is seen."""
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    mix = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return mix @ np.cbrt(np.clip(cones @ np.clip(rgb, 0, 1), 0, None))


MIB = 1024**2


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, "not measured"), (0, "0 MiB"), (1, "1 B"), (2048, "2.0 KiB"), (int(206.1 * MIB), "206.1 MiB"),
        (1024 * MIB, "1.00 GiB"),
        (0.46 * MIB, "471.0 KiB"), (MIB // 2, "512.0 KiB"),
        (1023 * MIB, "1,023.0 MiB"), (-3 * MIB, "\N{MINUS SIGN}3.0 MiB"),
        (5 * 1024**4, "5.00 TiB"),
    ],
)  # fmt: skip
def test_bytes(n_bytes: int | None, text: str) -> None:
    assert mib(n_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "not measured"), (0.0, "0.0 %"), (0.217, "+22 %"), (-0.73, "\N{MINUS SIGN}73 %"), (0.0312, "+3.1 %"),
        (0.0001, "+<0.1 %"), (0.00049, "+<0.1 %"), (0.0006, "+0.1 %"), (2.5, "+250 %"),
    ],
)  # fmt: skip
def test_signed_percent(share: float | None, text: str) -> None:
    assert percent(share, signed=True) == text


def test_times_carry_their_spread() -> None:
    assert milliseconds(Samples(ms=(10.0, 12.0, 11.0, 13.0, 12.0))) == "12.0 ± 0.5 ms"
    assert milliseconds(Samples(ms=(12.3,))) == "12.3 ms"
    assert milliseconds(Samples()) == milliseconds(None) == "not measured"


def test_counts_changes_and_axes() -> None:
    assert (count(1, "tensor"), count(0, "tensor"), count(1200, "tensor")) == ("1 tensor", "0 tensors", "1,200 tensors")
    assert change(None, 1) is change(1, None) is change(0, 1) is None and change(200, 50) == -0.75
    assert byte_axis(200 * MIB) == (MIB, "MiB") and byte_axis(80 * 1024 * MIB) == (1024 * MIB, "GiB")
    assert (byte_axis(4096 * MIB)[1], byte_axis(4096 * MIB - 1)[1]) == ("GiB", "MiB")
    assert flop_axis(16_490_000_000) == (1e9, "GFLOP")
    texts = ["not measured", "0 FLOP", "999 FLOP", "1.50 kFLOP", "16.49 GFLOP"]
    assert [flops(n) for n in (None, 0, 999, 1500, 16_490_000_000)] == texts


@pytest.mark.parametrize(("median", "half", "text"), [
    (192, 0.389, "192.0 ± 0.4 ms"),
    (531, 3.32, "531 ± 3 ms"),
    (1234, 22.2, "1,234 ± 22 ms"),
    (3.4, 0.0543, "3.40 ± 0.05 ms"),
    (0.0123, 0.001, "0.012 ± 0.001 ms"),
    (100, 1e-9, "100.0000 ± 0.0000 ms"),
    (5, 0, "5 ± 0 ms"),
])  # fmt: skip
def test_median_and_spread_end_at_the_same_digit(median: float, half: float, text: str) -> None:
    quartiles = (median - half, median - half, median, median + half, median + half)
    assert milliseconds(Samples(ms=quartiles)) == text


@given(st.integers(1, 10**16))
def test_axes_never_need_powers_of_ten(largest: int) -> None:
    assert largest / byte_axis(largest)[0] > 0
    assert 1 <= largest / flop_axis(largest)[0] < 1000 or largest >= 10**18


def test_an_empty_one_says_why_and_has_no_axes() -> None:
    fig = empty("How much?", "Not measured.")
    assert [one.text for one in fig.layout.annotations] == ["Not measured."] and not fig.data
    assert fig.layout.xaxis.visible is fig.layout.yaxis.visible is False
    for tick in (3, 2, 0):
        mark_cursor(fig, tick, [0.0, 1.5, 2.0])
    assert [line.x0 for line in fig.layout.shapes] == [2.0, 0.0], "a picked event that is not there is no line"


@pytest.mark.parametrize("dark", [False, True])
def test_words_that_stand_on_the_page_read_there_and_others_keep_their_colour(dark: bool) -> None:
    fig = figure("How much?")
    fig.add_trace(go.Bar(x=[1], y=["a"]))
    fig.add_annotation(text="on the page")
    fig.add_annotation(text="on a bar", font={"color": "white"})
    readable(fig, dark=dark)
    grey = QUIET_TEXT["dark" if dark else "light"]
    on_the_page = (fig.layout.xaxis.tickfont, fig.layout.yaxis.title.font, fig.data[0].outsidetextfont)
    assert {font.color for font in on_the_page} == {grey}
    assert [one.font.color for one in fig.layout.annotations] == [grey, "white"]


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
    wide = before / 5  # the optimizer has a sixth of the picture
    assert x[-1] - x[before] == pytest.approx(min(events, wide)) and (x[before] == before)
    long = replace(one, phases=(*one.phases[:-1], replace(one.phases[-1], first_tick=10)))
    narrowed = places(long, long)
    assert (narrowed[-1] - narrowed[9]) / narrowed[-1] == pytest.approx(1 / 6)
    at, labels = event_ticks(one)
    assert at == sorted(at) and labels[0] == "0" and labels[-1] == f"{one.allocations.n_ticks:,}"


def test_another_run_ends_forward_where_the_drawn_one_does() -> None:
    one, drawn = run(), run(recompute=[0, 1, 2, 3])
    own, onto = borders(one)["forward"], borders(drawn)["forward"]
    assert places(one, drawn)[own] == places(drawn, drawn)[onto]
    assert own != onto, "else nothing was stretched"


def test_in_time_the_step_lasts_as_long_as_the_median_step() -> None:
    one = replace(run(), times=TIMED)
    x = places(one, one, "time")
    assert x[-1] == 10.0 and (np.diff(x) >= 0).all()
    assert axis_layout("time", one)["title_text"] == "time (ms)"
    untimed = replace(one, times=None)
    assert "recording included" in axis_layout("time", untimed)["title_text"]


def test_there_is_no_time_where_a_run_has_none_or_was_only_played() -> None:
    one = run()
    assert one.allocations is not None and has_times(one) and has_times(one, None)
    bare = replace(one, allocations=replace(one.allocations, time_ns=column()))
    assert not has_times(bare) and not has_times(one, bare) and not has_times(None)
    assert not has_times(replace(one, origin="predicted")), "the clock was that of the player"


lines = arrays(np.int64, st.integers(1, 3000), elements=st.integers(-(10**12), 10**12))


@given(lines, st.integers(4, 300))
def test_extremes_and_ends_survive_exactly(line: np.ndarray, n_points: int) -> None:
    kept = minmax(line, n_points)
    assert len(kept) <= max(n_points, 0)
    assert kept[0] == 0 and kept[-1] == len(line) - 1
    assert (np.diff(kept) > 0).all()
    assert line[kept].max() == line.max()
    assert line[kept].min() == line.min()
    assert int(line.argmax()) in set(kept.tolist()), "the first of equal peaks is drawn"


def series(**changed: object) -> BarSeries:
    usual = {"name": "gradient", "lengths": [1.0, None], "figures": ["1.0 MiB", "not measured"], "colour": "#1E9E62"}
    return BarSeries(**{**usual, **changed})  # type: ignore[arg-type]


def test_a_bar_says_its_row_its_series_and_its_figure() -> None:
    fig = figure("What?")
    add_bars(fig, ["rank 0", "rank 1"], series(), showlegend=False)
    (trace,) = fig.data
    assert (trace.orientation, trace.name, trace.y, trace.x) == ("h", "gradient", ("rank 0", "rank 1"), (1.0, None))
    assert trace.hovertemplate == bold("%{y}") + "\ngradient: %{customdata[1]}"
    assert [list(custom) for custom in trace.customdata] == [["", "1.0 MiB"], ["", "not measured"]]
    assert trace.showlegend is False and trace.marker.line.width is None


def test_a_click_finds_what_the_bar_stands_for_and_colour_is_not_all() -> None:
    fig = figure("What?")
    add_bars(fig, ["a", "b"], series(picks=["a.0 a.1", "b"], pattern="/", edge="#000000"))
    assert [custom[0] for custom in fig.data[0].customdata] == ["a.0 a.1", "b"]
    assert (fig.data[0].marker.pattern.shape, fig.data[0].marker.line.color) == ("/", "#000000")
