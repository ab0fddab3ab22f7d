"""Charts of a comparison: headline, cost, front, plane of runs, gradients and audit."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from explorer.plan.why.gradients import causes
from explorer.record.comparison import BufferDiff, Comparison, GradientDiff, MaskDiff, RngDiff, StateChange, StateDiff
from explorer.record.failure import Failure
from explorer.record.graph import Hazard
from explorer.record.late_read import LateRead
from explorer.record.measurement import AllocatorPeaks, Samples, Times
from explorer.record.policy import Policy, Unit
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time, time_answer
from explorer.view.compare.front import TOO_FEW, UNSAFE, Mark, RunPoint, front_chart, is_ahead, run_plane
from explorer.view.compare.gradients import (
    carried_table,
    diff_table,
    gradient_chart,
    mask_table,
    rng_table,
    scope_sentence,
    state_change_table,
    verdict_sentence,
)
from explorer.view.compare.headline import bytes_headline, danger, doubt, errors, headlines, warning_lines
from explorer.view.drawing.units import MIB
from tests.view.builders import compared, equal_gradient, measured, wrong_gradient


def test_a_good_policy() -> None:
    strip = {head.key: head for head in headlines(compared(recompute=range(6)))}
    assert bytes_headline("step_peak_bytes", 270_000, 266_000).value == "263.7 → 259.8 KiB", "0.3 → 0.3 MiB says less"
    assert bytes_headline("step_peak_bytes", 100_659, 105_779).value == "98.3 → 103.3 KiB", "not 98.3 KiB → 0.1 MiB"
    peak = strip["step_peak_bytes"]
    assert (peak.value, peak.delta, peak.tone) == ("149.0 → 90.0 MiB", "\N{MINUS SIGN}40 %", "good")
    assert (strip["flop_ratio"].value, strip["flop_ratio"].tone) == ("+25 %", "bad")
    assert strip["time_ratio"].value == "×1.20 ± 0.01", "no two runs take the same time"
    assert (strip["verdict"].value, strip["verdict"].delta) == ("bitwise equal", "6 of 6 tensors equal")
    assert (strip["n_recompute"].value, strip["n_recompute"].tone) == ("6 of 6 blocks", "neutral")
    pair = compared()
    assert strip.keys() <= set(pair.headlines()) | set(pair.candidate.headlines()) | {"n_recompute"}, "keys of --json"
    alone = headlines(measured())
    assert [head.key for head in alone] == ["step_peak_bytes", "saved_after_forward_bytes", "total_flops", "step_ms"]
    assert all(head.delta == "" for head in alone)
    assert headlines(measured(recompute=[0]))[-1].key == "n_recompute"


def test_what_flops_leave_out_stands_beside_them() -> None:
    pair = compared()
    left_out = msgspec.structs.replace(pair.candidate, uncounted_ops={"aten.linalg_qr.default": 12})
    for run in (left_out, msgspec.structs.replace(pair, candidate=left_out)):
        strip = {head.label: head for head in headlines(run)}
        assert "FLOPs leave out aten.linalg_qr.default (12 calls)" in strip["FLOPs"].tooltip
    assert "leave out" not in {head.label: head for head in headlines(pair)}["FLOPs"].tooltip


def test_a_policy_without_effect_is_bad_news() -> None:
    pair = compared(recompute=[0, 1])
    still = msgspec.structs.replace(
        pair.candidate, blocks=tuple(msgspec.structs.replace(cost, n_recompute=0) for cost in pair.candidate.blocks)
    )
    strip = {head.key: head for head in headlines(msgspec.structs.replace(pair, candidate=still))}
    assert (strip["n_recompute"].value, strip["n_recompute"].delta) == ("0 of 2 blocks", "policy without effect")
    moved = Policy(units=(Unit(blocks=("layers.4",), action="offload"), *still.spec.policy.units))
    offloading = msgspec.structs.replace(
        still,
        spec=msgspec.structs.replace(still.spec, policy=moved),
        peaks=AllocatorPeaks(offloaded_peak_bytes=3 << 20),
    )
    delta = "policy without effect, 1 block offloaded, 3.0 MiB on the host"
    assert headlines(offloading)[-1].delta == delta
    assert strip["n_recompute"].tone == "bad"


def test_unknown_is_said() -> None:
    pair = compared()
    bare = {
        name: msgspec.structs.replace(run, allocations=None, times=None, blocks=())
        for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate))
    }
    for head in headlines(msgspec.structs.replace(pair, **bare)):
        if head.key != "verdict":
            assert "not measured" in head.value, head


def test_the_card_says_how_many_differ_of_how_many() -> None:
    pair = compared(n_gradients=6)
    gone = msgspec.structs.replace(pair.gradients[0], name="unused", presence="neither")
    wrong = (*pair.gradients[:2], *(wrong_gradient(diff.name) for diff in pair.gradients[2:]), gone)
    card = {head.key: head for head in headlines(msgspec.structs.replace(pair, gradients=wrong))}["verdict"]
    assert (card.value, card.delta, card.tone) == (
        "different",
        "4 of 6 tensors differ, 1 more without a gradient",
        "bad",
    )
    later = msgspec.structs.replace(pair, later_gradients=(wrong_gradient("layers.0.weight"),))
    card = {head.key: head for head in headlines(later)}["verdict"]
    assert (card.value, card.delta) == ("different", "6 of 6 tensors equal in the first step")
    moved = msgspec.structs.replace(compared(), rng=(RngDiff(generator="python", equal=False),))
    card = {head.key: head for head in headlines(moved)}["verdict"]
    assert (card.value, card.delta, card.tone) == ("state moved", "6 of 6 tensors equal", "bad")


def test_figures_of_a_recorded_step_are_recorded_and_what_is_unknown_has_no_origin() -> None:
    run = msgspec.structs.replace(measured(), origin="recorded", recorded_in="train.py:42", times=None)
    strip = {head.key: head for head in headlines(run)}
    assert strip["step_peak_bytes"].origin == strip["saved_after_forward_bytes"].origin == ("recorded",)
    assert strip["total_flops"].origin == ("counted",)
    assert strip["step_ms"].value == "not measured" and strip["step_ms"].origin == ()


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
    assert recompute_cost(compared(recompute=range(6))).figure.layout.title.subtitle.text == "+25 % FLOPs in the step"
    assert recompute_cost(compared(recompute=[])).figure.layout.title.subtitle.text == "0.0 % more FLOPs in the step"


def test_a_difference_inside_the_noise_is_not_ranked_and_one_beyond_it_is_a_ratio_with_its_spread() -> None:
    pair = with_steps(compared(), baseline=(10, 12, 11, 10, 12), candidate=(11, 12, 10, 12, 11))
    assert time_answer(pair).endswith("; the difference is inside the noise")
    pair = with_steps(compared(), baseline=(10, 10, 10, 10, 10), candidate=(13, 13, 13, 13, 9))
    assert time_answer(pair).endswith("; the difference is not in every pair of steps")
    pair = with_steps(compared(), baseline=(10, 10.1, 9.9), candidate=(12, 12.2, 11.8))
    assert time_answer(pair) == "10.0 ± 0.1 ms to 12.0 ± 0.2 ms a step, ×1.20 ± 0.01"


def test_table_twin_is_exact() -> None:
    pair = compared(recompute=[2])
    table = {row["block"]: row for row in recompute_cost(pair).rows()}
    assert table["layers.2"]["recompute (FLOP)"] == 750_000_000
    assert table["layers.2"]["skipped by early stop (FLOP)"] == 250_000_000
    times = {row["block"]: row for row in recompute_time(pair).rows()}
    assert times["layers.1"]["recompute"] == "not run"
    for trace, run in zip(step_time(pair).figure.data, (pair.baseline, pair.candidate)):
        steps = [row["step (ms)"] for row in step_time(pair).rows() if row["run"] == trace.name]
        assert list(trace.x) == steps == list(run.times.step.ms)
    assert table["(whole model)"]["forward (FLOP)"] == pair.candidate.forward_flops


def test_the_bars_of_times_have_their_spread_as_error_bars() -> None:
    pair = compared()
    blocks = {block.fqn: block for block in pair.candidate.blocks}
    for bars in recompute_time(pair).figure.data:
        samples = [getattr(blocks[label], bars.name) for label in bars.y]
        assert list(bars.error_x.array) == [sample.spread_ms for sample in samples] != list(bars.x)


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


SOME, ALL = Policy.recompute(["a"]), Policy.recompute(["a", "b"])
MARKS = (
    Mark(kind="plan", policy=ALL, peak_bytes=40 * MIB, time_ratio=1.4),
    Mark(kind="plan", policy=SOME, peak_bytes=70 * MIB, time_ratio=1.1),
    Mark(kind="plan", policy=Policy(), peak_bytes=100 * MIB, time_ratio=1.0),
    Mark(kind="preset", policy=ALL, peak_bytes=41 * MIB, time_ratio=1.4, name="Recompute all"),
    Mark(kind="run", policy=SOME, peak_bytes=71 * MIB, time_ratio=1.12, spread=0.02, measured=True),
    Mark(kind="drawn", policy=SOME, peak_bytes=71 * MIB, time_ratio=1.12, spread=0.02, measured=True),
)


def test_every_kind_has_a_symbol_of_its_own() -> None:
    traces = front_chart(MARKS).figure.data
    assert len({trace.marker.symbol for trace in traces}) == len({trace.name for trace in traces}) == 4
    assert [name for trace in traces for name, *_ in trace.customdata] == [mark.id for mark in MARKS]
    assert len({mark.id for mark in MARKS}) == len({mark.policy for mark in MARKS})
    (run,) = [trace for trace in traces if trace.name == "runs, measured"]
    assert list(run.error_y.array) == [0.02] and "measured" in run.customdata[0][2]
    assert "open" not in run.marker.symbol


def test_the_answer_is_about_the_budget() -> None:
    assert "from 100.0 down to 40.0 MiB for ×1.40 time, predicted" in front_chart(MARKS).alt
    within = front_chart(MARKS, budget_bytes=80 * MIB)
    assert "within 80.0 MiB: 70.0 MiB for ×1.10 time, predicted" in within.alt
    assert "budget 80.0 MiB" in [note.text for note in within.figure.layout.annotations]
    assert not front_chart(MARKS, budget_bytes=2**40).figure.layout.shapes, "a budget far away would squeeze the rest"


def test_a_step_that_nobody_timed_is_not_drawn_against_time() -> None:
    marks = [replace(mark, counts="FLOPs") for mark in MARKS[:4]]
    chart = front_chart(marks)
    assert "FLOPs" in chart.figure.layout.yaxis.title.text and "step time" not in chart.figure.layout.yaxis.title.text
    assert "step time" not in chart.alt and "for ×1.40 FLOPs, predicted" in chart.alt
    assert "FLOPs (× everything kept)" in chart.rows()[0] and "×1.40 FLOPs" in chart.figure.data[0].customdata[0][2]
    assert front_chart(MARKS).figure.layout.yaxis.title.text == "step time, × everything kept"


def test_the_table_has_every_mark_and_its_origin() -> None:
    rows = front_chart(MARKS).rows()
    assert [row["origin"] for row in rows] == ["predicted"] * 4 + ["measured"] * 2
    assert rows[4]["±"] == 0.02 and rows[3]["what"] == "Recompute all"
    assert front_chart(()).figure.layout.title.text


def point(peak: int, ms: float, *, verdict: str = "bitwise equal", conditions: str = "small, cpu") -> RunPoint:
    return RunPoint(
        name=f"{peak} in {ms}", policy="keep all", conditions=conditions, peak_bytes=peak * MIB, step_ms=ms,
        spread_ms=1.0, verdict=verdict,
    )  # fmt: skip


def ahead(*points: RunPoint) -> list[int]:
    return [place for place in range(len(points)) if is_ahead(points, place)]


def test_a_run_is_beaten_by_one_of_its_conditions_that_needs_neither_more_memory_nor_more_time() -> None:
    assert ahead(point(100, 50.0), point(60, 70.0), point(60, 80.0), point(70, 90.0)) == [0, 1]
    assert ahead(point(100, 50.0), point(60, 50.9)) == [1], "less memory in a time that cannot be told apart"
    assert ahead(point(60, 50.0), point(60, 50.9)) == [0, 1]
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


def with_gradients(*diffs: GradientDiff) -> Comparison:
    return msgspec.structs.replace(compared(), gradients=diffs)


def missing(name: str) -> GradientDiff:
    return GradientDiff(name=name, shape=(), dtype="float32", presence="baseline only", bitwise=False)


@pytest.mark.parametrize("n", [4, 10, 24, 25, 1000])
def test_every_gradient_is_drawn_once(n: int) -> None:
    diffs = [wrong_gradient(f"w{i}", 10.0 ** -(i % 9)) if i % 7 == 3 else equal_gradient(f"w{i}") for i in range(n)]
    fig = gradient_chart(with_gradients(*diffs)).figure
    names = [custom[0] for trace in fig.data for custom in trace.customdata]
    assert sorted(names) == sorted(f"w{i}" for i in range(n))
    assert fig.layout.height <= 150 + 22 * 24


def test_where_every_gradient_is_equal_a_sentence_says_so_and_no_axis_is_drawn() -> None:
    chart = gradient_chart(with_gradients(equal_gradient("a"), equal_gradient("b")))
    assert not chart.figure.data and not chart.figure.layout.xaxis.visible
    (note,) = chart.figure.layout.annotations
    assert "2 of 2 gradients bitwise equal: there is no distance to draw." in note.text
    assert len(chart.rows()) == 2


def test_distance_is_the_place_on_a_logarithmic_axis() -> None:
    fig = gradient_chart(
        with_gradients(wrong_gradient("far", 1.0), wrong_gradient("near", 1e-4), equal_gradient("same"))
    ).figure
    place = {custom[0]: x for trace in fig.data for custom, x in zip(trace.customdata, trace.x)}
    assert place["far"] == 0 and place["near"] == pytest.approx(-4)
    assert place["same"] < place["near"]
    assert fig.layout.xaxis.ticktext[0] == "equal" and fig.layout.xaxis.tickvals[0] == place["same"]


def test_a_missing_gradient_and_a_nan_are_beyond_every_distance() -> None:
    nan = msgspec.structs.replace(wrong_gradient("nan"), n_nonfinite_mismatch=3, relative_norm=math.nan)
    fig = gradient_chart(with_gradients(missing("gone"), nan, wrong_gradient("far", 100.0))).figure
    place = {custom[0]: (x, custom[2]) for trace in fig.data for custom, x in zip(trace.customdata, trace.x)}
    assert place["gone"][0] == place["nan"][0] > place["far"][0]
    assert place["gone"][1] == "present in baseline only"
    assert place["nan"][1] == "3 elements finite on one side only"
    assert fig.layout.xaxis.ticktext[-1] == "no number"


def test_verdicts_differ_by_symbol() -> None:
    rounding = msgspec.structs.replace(wrong_gradient("r", 1e-6), candidate_error=1e-6)
    fig = gradient_chart(with_gradients(equal_gradient("e"), rounding, wrong_gradient("d"))).figure
    assert {trace.name: trace.marker.symbol for trace in fig.data} == {
        "bitwise equal (1)": "circle",
        "rounding (1)": "diamond",
        "different (1)": "x",
    }
    pair = with_gradients(equal_gradient("a"), wrong_gradient("b", 0.1), missing("c"), wrong_gradient("d", 0.5))
    assert [row["tensor"] for row in gradient_chart(pair).rows()] == ["c", "d", "b", "a"], "the worst comes first"
    assert gradient_chart(pair).rows()[0]["relative distance"] is None


def test_sentences() -> None:
    assert verdict_sentence(with_gradients(equal_gradient("a"))) == "1 of 1 gradient bitwise equal"
    pair = with_gradients(equal_gradient("a"), wrong_gradient("b"))
    assert verdict_sentence(pair) == "different: 1 of 2 gradients bitwise equal, worst b"
    assert verdict_sentence(pair) in gradient_chart(pair).alt
    shaky = msgspec.structs.replace(pair, reproducible=False, not_reproducible_because="scatter_add is unordered")
    assert verdict_sentence(shaky) == "not comparable: scatter_add is unordered"
    moved = BufferDiff(name="bn.running_mean", shape=(4,), dtype="float32", presence="both", bitwise=False, max_abs=0.1)
    pair = msgspec.structs.replace(compared(), buffers=(moved,))
    assert verdict_sentence(pair) == "gradients equal, state moved twice: running_mean of bn"
    assert [row["tensor"] for row in diff_table(pair.buffers)] == ["bn.running_mean"]
    failed = msgspec.structs.replace(with_gradients(), failure=Failure(kind="crash", sentence="The worker died."))
    assert gradient_chart(failed).figure.layout.annotations[0].text == "The worker died."


def test_what_moved_is_named_and_the_rest_counted() -> None:
    moved = [
        StateDiff(
            name=f"blocks.{i}.step", shape=(), dtype="int", presence="both", bitwise=False, block=f"blocks.{i}",
            kind="attribute", step=1, baseline_value="1", candidate_value="2",
        )
        for i in range(6)
    ]  # fmt: skip
    pair = msgspec.structs.replace(compared(), carried=tuple(moved))
    sentence = "step of blocks.0, step of blocks.1, step of blocks.2, step of blocks.3 and 2 more"
    assert verdict_sentence(pair) == f"gradients equal, state moved twice: {sentence}"
    row = carried_table(pair)[0]
    assert (row["block"], row["what"], row["baseline"], row["candidate"]) == ("blocks.0", "step", "1", "2")


def test_a_value_that_the_recompute_reads_late_is_named() -> None:
    reads = [
        LateRead(block=block, owner=block, name="config.step", in_forward="0", in_recompute="1")
        for block in ("blocks.0", "blocks.1")
    ]
    late = msgspec.structs.replace(compared(), late_reads=tuple(reads))
    assert late.verdict == "state moved"
    assert verdict_sentence(late) == "gradients equal, the recompute reads other values than forward: config.step"
    assert len(causes(late)) == 1, "said once"
    assert causes(late)[0].startswith("The recompute of blocks.0, blocks.1 reads config.step 1, forward read 0")


def test_what_the_verdict_leaves_out_is_said() -> None:
    assert scope_sentence(compared()) == ""
    pair = msgspec.structs.replace(compared(), unjudged=tuple(f"blocks.{i}.clock" for i in range(5)))
    sentence = scope_sentence(pair)
    assert sentence.startswith("Not judged, two runs of the baseline differ there: blocks.0.clock, ")
    assert sentence.endswith(" and 1 more.")
    probed = msgspec.structs.replace(compared(), n_probes=5)
    assert scope_sentence(probed).startswith("To find hidden state, each block ran 5 more times before the step.")
    assert "--probe N" in scope_sentence(probed), "what lies beyond, and what looks further"
    twice = scope_sentence(msgspec.structs.replace(probed, n_probed_twice=11))
    assert "before the step, or twice where it only repeats another block (11 blocks). " in twice


def test_what_differs_comes_first() -> None:
    pair = msgspec.structs.replace(
        compared(),
        rng=(RngDiff(generator="torch cpu", equal=True), RngDiff(generator="python", equal=False)),
        masks=(MaskDiff(block="a", n_elements=10, n_mismatched=0), MaskDiff(block="b", n_elements=10, n_mismatched=2)),
        state_changes=(
            StateChange(block="bn", name="num_batches_tracked", kind="buffer", after_forward="1", after_backward="2"),
        ),
    )
    assert [row["generator"] for row in rng_table(pair)] == ["python", "torch cpu"]
    assert [(row["block"], row["mismatch share"]) for row in mask_table(pair)] == [("b", 0.2), ("a", 0.0)]
    assert state_change_table(pair)[0]["after backward"] == "2"


def test_what_goes_wrong_is_said_where_a_policy_is_run_or_taken_away() -> None:
    wrong = Hazard(rule="r", severity="error", blocks=("a",), sentence="It draws\nother numbers in *a*.", remedy="Do.")
    note = Hazard(rule="s", severity="note", blocks=("a",), sentence="By the way.", remedy="Nothing.")
    assert errors((note, wrong)) == (wrong,)
    assert danger((wrong, wrong, note)).endswith("Do. 1 more error in the tab Gradients.")
    assert danger((note,)) == warning_lines((note,)) == ""
    assert warning_lines((wrong,)).splitlines()[2] == "#   It draws other numbers in *a*. Do."
    assert "different" in doubt("different") and doubt("rounding") == doubt(None) == ""
