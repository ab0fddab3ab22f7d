"""One mark a gradient, its verdict told by symbol and by place."""

from __future__ import annotations

import math

import msgspec
import pytest

from explorer.record import BufferDiff, Comparison, Failure, GradientDiff, StateDiff
from explorer.view.compare.gradients import (
    buffer_table,
    carried_table,
    gradient_chart,
    scope_sentence,
    verdict_sentence,
)
from tests.view.builders import compared, equal_gradient, wrong_gradient


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


def test_few_tensors_are_named_in_module_order() -> None:
    fig = gradient_chart(with_gradients(wrong_gradient("b"), equal_gradient("a"))).figure
    assert list(fig.layout.yaxis.categoryarray) == ["b", "a"]


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


def test_table_starts_with_the_worst() -> None:
    pair = with_gradients(equal_gradient("a"), wrong_gradient("b", 0.1), missing("c"), wrong_gradient("d", 0.5))
    assert [row["tensor"] for row in gradient_chart(pair).rows()] == ["c", "d", "b", "a"]
    assert gradient_chart(pair).rows()[0]["relative distance"] is None


def test_sentences() -> None:
    assert verdict_sentence(with_gradients(equal_gradient("a"))) == "1 of 1 gradient bitwise equal"
    pair = with_gradients(equal_gradient("a"), wrong_gradient("b"))
    assert verdict_sentence(pair) == "different: 1 of 2 gradients bitwise equal, worst b"
    assert verdict_sentence(pair) in gradient_chart(pair).alt
    shaky = msgspec.structs.replace(pair, reproducible=False, not_reproducible_because="scatter_add is unordered")
    assert verdict_sentence(shaky) == "not comparable: scatter_add is unordered"


def test_equal_gradients_with_a_changed_buffer_are_not_called_equal() -> None:
    moved = BufferDiff(name="bn.running_mean", shape=(4,), dtype="float32", presence="both", bitwise=False, max_abs=0.1)
    pair = msgspec.structs.replace(compared(), buffers=(moved,))
    assert verdict_sentence(pair) == "gradients equal, state moved twice: running_mean of bn"
    assert [row["tensor"] for row in buffer_table(pair)] == ["bn.running_mean"]


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


def test_what_the_verdict_leaves_out_is_said() -> None:
    assert scope_sentence(compared()) == ""
    pair = msgspec.structs.replace(compared(), unjudged=tuple(f"blocks.{i}.clock" for i in range(5)))
    sentence = scope_sentence(pair)
    assert sentence.startswith("Not judged, two runs of the baseline differ there: blocks.0.clock, ")
    assert sentence.endswith(" and 1 more")
    probed = msgspec.structs.replace(compared(), n_probes=5)
    assert scope_sentence(probed) == "Each block ran 5 more times before the step, in search of hidden state"


def test_a_failure_is_shown_in_its_own_words() -> None:
    failed = msgspec.structs.replace(with_gradients(), failure=Failure(kind="crash", sentence="The worker died."))
    assert gradient_chart(failed).figure.layout.annotations[0].text == "The worker died."
