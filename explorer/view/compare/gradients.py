"""Comparison of every gradient of both runs: one mark per tensor, readable at ten tensors and at a thousand.

The distance is |candidate - baseline| / |baseline| on a logarithmic axis. Logarithms have no zero, so bitwise equal
tensors stand on a separate line below the axis. Tensors without a distance (missing, not finite) stand above the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import plotly.graph_objects as go

from explorer.plan.names import listed
from explorer.plan.why.checkpointing import moved_in, not_comparable_because
from explorer.record.comparison import Comparison, StateDiff, TensorDiff, Verdict
from explorer.view.drawing.colours import VERDICT_COLOURS, VERDICT_SYMBOLS
from explorer.view.drawing.figure import Chart, bold, empty, figure
from explorer.view.drawing.units import count

QUESTION = "Is every gradient the same?"
WORST_FIRST: tuple[Verdict, ...] = ("different", "state moved", "not comparable", "rounding", "bitwise equal")
MAX_NAMES = 24
"""Beyond that many tensors the axis counts them instead of naming them."""
MAX_MOVED = 4
"""Number of states that one sentence names."""

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def all_equal(comparison: Comparison) -> bool:
    """Whether every gradient is bitwise equal, so that a chart of distances would be empty."""
    return bool(comparison.gradients) and all(diff.verdict == "bitwise equal" for diff in comparison.gradients)


def seal(comparison: Comparison) -> list[dict[str, object]]:
    """The evidence behind equal gradients: what was compared bit by bit, how much of it, and how much is equal."""
    groups = [
        ("gradients", comparison.gradients),
        ("gradients of the inputs", comparison.input_gradients),
        (f"gradients of step {comparison.n_steps}", comparison.later_gradients),
        (f"parameters after {comparison.n_steps} steps", comparison.parameters),
        ("buffers", comparison.buffers),
    ]
    rows = []
    for name, diffs in groups:
        verdicts = [diff.verdict for diff in diffs if diff.presence != "neither"]
        rows.append((name, len(verdicts), verdicts.count("bitwise equal")))
    rows.append(("random generators", len(comparison.rng), sum(diff.equal for diff in comparison.rng)))
    rows.append(("dropout masks", len(comparison.masks), sum(not diff.n_mismatched for diff in comparison.masks)))
    return [{"compared": name, "tensors": n, "bitwise equal": n_equal} for name, n, n_equal in rows if n]


def gradient_chart(comparison: Comparison) -> Chart:
    """Chart of the distance of each gradient from the baseline's gradient, a mark per gradient in module order.
    customdata starts with the tensor's name."""
    diffs, answer = comparison.gradients, verdict_sentence(comparison)
    if not diffs:
        fig = empty(QUESTION, comparison.failure.sentence if comparison.failure else "No gradient was compared.")
    elif all_equal(comparison):
        fig = empty(QUESTION, f"{answer}: there is no distance to draw.")
    else:
        fig = _picture(diffs, answer)
    return Chart(
        name="differences of the gradients",
        figure=fig,
        alt=f"One mark for each gradient, by its distance from the baseline. {answer}.",
        rows=lambda: diff_table(diffs),
    )


def _picture(diffs: Sequence[TensorDiff], answer: str) -> go.Figure:
    numbers = [value for diff in diffs if (value := _exponent(diff)) is not None]
    low = math.floor(min(numbers, default=-1)) - 1
    high = math.ceil(max(numbers, default=-1)) + 1
    named = len(diffs) <= MAX_NAMES
    fig = figure(QUESTION, answer, height=150 + 22 * max(len(diffs), 6) if named else 420)
    for verdict in get_args(Verdict):
        if chosen := [(i, diff) for i, diff in enumerate(diffs, 1) if diff.verdict == verdict]:
            fig.add_trace(_marks(verdict, chosen, (low, high), named=named))
    _axes(fig, [diff.name for diff in diffs], low, high)
    return fig


def carried_table(comparison: Comparison) -> list[dict[str, object]]:
    """Rows of further state that the model carries on and that differs."""
    return [
        {
            "block": diff.block or "the model",
            "what": diff.name.removeprefix(f"{diff.block}."),
            "kind": diff.kind,
            "after step": diff.step,
            "verdict": diff.verdict,
            "baseline": diff.baseline_value,
            "candidate": diff.candidate_value,
        }
        for diff in comparison.carried
    ]


def diff_table(diffs: Sequence[TensorDiff]) -> list[dict[str, object]]:
    """Any tensors of both runs, worst first; an unknown figure stays None."""
    rank = {verdict: i for i, verdict in enumerate(WORST_FIRST)}
    ordered = sorted(diffs, key=lambda diff: (rank[diff.verdict], -(_exponent(diff) or math.inf)))
    return [
        {
            "tensor": diff.name,
            "verdict": diff.verdict,
            "present in": diff.presence,
            "shape": _shape(diff),
            "dtype": diff.dtype,
            "relative distance": diff.relative_norm,
            "largest difference": diff.max_abs,
            "largest ULP distance": diff.max_ulp,
            "cosine": diff.cosine,
            "norm ratio": diff.norm_ratio,
            "not finite on one side": diff.n_nonfinite_mismatch,
            "baseline to float64": diff.baseline_error,
            "candidate to float64": diff.candidate_error,
            "noise of the baseline": diff.noise,
        }
        for diff in ordered
    ]


def verdict_sentence(comparison: Comparison) -> str:
    """`bitwise equal: 54 of 54 gradients`, or the verdict and the worst tensor."""
    if comparison.verdict == "not comparable":
        return f"not comparable: {not_comparable_because(comparison) or 'no gradient on either side'}"
    untrained = ""
    if lost := len(comparison.untrained):
        untrained = f"; {count(lost, 'trainable parameter')} without a gradient in the baseline"
    if comparison.verdict == "state moved":
        return f"gradients equal, {moved_sentence(comparison)}{untrained}"
    same = f"{comparison.n_bitwise_equal:,} of {count(comparison.n_gradients, 'gradient')} bitwise equal{untrained}"
    if comparison.verdict == "bitwise equal":
        return same
    if comparison.worst is None:
        return f"{comparison.verdict}: {same}"
    return f"{comparison.verdict}: {same}, worst {comparison.worst.name}"


def moved_sentence(comparison: Comparison) -> str:
    """`state moved twice: step of blocks.0, mean of blocks.1 and 4 more`, or what a recompute reads late."""
    moved = comparison.moved_twice
    if not moved and comparison.late_reads:
        names = tuple(dict.fromkeys(read.name for read in comparison.late_reads))
        return f"the recompute reads other values than forward: {listed(names, MAX_MOVED)}"
    if not moved:
        blocks = [mask.block for mask in comparison.masks if mask.n_mismatched]
        return f"but the recompute drew other random numbers: {', '.join(blocks)}"
    side = moved_in(comparison)
    return f"state moved twice{side and f' in {side}'}: {listed(moved, MAX_MOVED)}"


def scope_sentence(comparison: Comparison) -> str:
    """The runs of the blocks before the verdict, and what the verdict leaves out; empty if there is neither."""
    clauses, names = [], comparison.unjudged
    if names:
        clauses.append(f"Not judged, two runs of the baseline differ there: {listed(names, MAX_MOVED)}")
    if kinds := comparison.without_tf32:
        clauses.append(f"Judged in full float32; the timed steps may use TF32 for {', '.join(kinds)}")
    if left_out := comparison.not_walked:
        clauses.append(f"Too many objects to look at each: {listed(left_out, MAX_MOVED)}")
    if because := comparison.not_probed_because:
        clauses.append(f"Not probed for hidden state: {because.rstrip('.')}")
    if times := comparison.n_probes:
        n_twice = comparison.n_probed_twice
        but = f", or twice where it only repeats another block ({n_twice} blocks)" if n_twice else ""
        clauses.append(
            f"To find hidden state, each block ran {count(times, 'more time')} before the step{but}. "
            "A change that begins later is not seen; on the command line, --probe N runs each block N times"
        )
    return "".join(f"{clause}. " for clause in clauses).rstrip()


def _exponent(diff: TensorDiff) -> float | None:
    """log10 of the distance; None: it has none (equal, missing, not finite, or the baseline is all zero)."""
    distance = diff.relative_norm
    return math.log10(distance) if distance and math.isfinite(distance) else None


def _place(diff: TensorDiff, low: int, high: int) -> float:
    exponent = _exponent(diff)
    if exponent is not None and diff.presence == "both" and not diff.n_nonfinite_mismatch:
        return exponent
    return low if diff.verdict == "bitwise equal" else high


def _marks(
    verdict: Verdict, numbered: Sequence[tuple[int, TensorDiff]], ends: tuple[int, int], *, named: bool
) -> go.Scatter:
    """`ends`: of the axis of distances. The other axis has the names of the tensors, or their numbers."""
    custom = [[diff.name, _shape(diff), distance_in_words(diff)] for _, diff in numbered]
    where = [_place(diff, *ends) for _, diff in numbered]
    places = {"x": where, "y": [diff.name for _, diff in numbered]}
    if not named:
        places = {"x": [number for number, _ in numbered], "y": where}
    return go.Scatter(
        **places, mode="markers", customdata=custom,
        name=f"{verdict} ({len(numbered):,})",
        marker={"color": VERDICT_COLOURS[verdict], "symbol": VERDICT_SYMBOLS[verdict], "size": 9 if named else 6},
        hovertemplate=bold("%{customdata[0]}") + f"\n{verdict}: %{{customdata[2]}}\nshape %{{customdata[1]}}",
    )  # fmt: skip


def _shape(diff: TensorDiff) -> str:
    return " x ".join(map(str, diff.shape)) or "scalar"


def distance_in_words(diff: TensorDiff) -> str:
    """`relative distance 0.31`, or why there is none."""
    if diff.presence != "both":
        return f"present in {diff.presence}"
    if diff.n_nonfinite_mismatch:
        return f"{count(diff.n_nonfinite_mismatch, 'element')} finite on one side only"
    if diff.bitwise:
        return "every bit agrees"
    if diff.relative_norm is not None:
        return f"relative distance {diff.relative_norm:.2g}"
    if diff.baseline_norm == 0:
        return "the baseline is all zero"
    if isinstance(diff, StateDiff) and diff.max_abs is None:
        return f"{diff.baseline_value} in the baseline, {diff.candidate_value} in the candidate"
    return "another shape or type" if diff.max_abs is None else f"off by {diff.max_abs:.4g}"


def _axes(fig: go.Figure, names: Sequence[str], low: int, high: int) -> None:
    step = max(1, (high - low) // 6)
    powers = list(range(low + 1, high, step))
    distance = {
        "tickvals": [low, *powers, high],
        "ticktext": ["equal", *(f"10{str(p).translate(_SUPERSCRIPT)}" for p in powers), "no number"],
        "range": [low - 0.4, high + 0.4],
        "title_text": "relative distance of the gradients",
    }
    if len(names) <= MAX_NAMES:
        fig.update_xaxes(**distance)
        fig.update_yaxes(type="category", autorange="reversed", categoryorder="array", categoryarray=names)
    else:
        fig.update_yaxes(**distance)
        fig.update_xaxes(title_text=f"{len(names):,} gradients in module order", range=[0, len(names) + 1])


def rng_table(comparison: Comparison) -> list[dict[str, object]]:
    """Each random generator: whether both runs left it in the same place."""
    return [
        {"generator": diff.generator, "after the step": "same position" if diff.equal else "different position"}
        for diff in sorted(comparison.rng, key=lambda diff: diff.equal)
    ]


def mask_table(comparison: Comparison) -> list[dict[str, object]]:
    """Rows of the dropout modules: the mask of forward against the mask of recompute, worst first."""
    return [
        {
            "block": diff.block,
            "elements": diff.n_elements,
            "mismatched": diff.n_mismatched,
            "mismatch share": diff.mismatch_share,
            "verdict": "different mask" if diff.n_mismatched else "same mask",
        }
        for diff in sorted(comparison.masks, key=lambda diff: -diff.mismatch_share)
    ]


def state_change_table(comparison: Comparison) -> list[dict[str, object]]:
    """Rows of the buffers and plain attributes that the recompute changed a second time."""
    return [
        {
            "block": change.block,
            "name": change.name,
            "kind": change.kind,
            "after forward": change.after_forward,
            "after backward": change.after_backward,
        }
        for change in comparison.state_changes
    ]


def compared_tensors(comparison: Comparison) -> str:
    """`over 12 gradients, 3 buffers`; empty: nothing was compared."""
    parts = [
        (comparison.n_gradients, "gradient", ""),
        (len(comparison.input_gradients), "input gradient", ""),
        (len(comparison.buffers), "buffer", ""),
        (len(comparison.parameters), "parameter", f" after {count(comparison.n_steps, 'step')}"),
        (len(comparison.rng), "random generator", ""),
        (comparison.n_carried, "remembered value", ""),
    ]
    compared = [count(n, what) + after for n, what, after in parts if n]
    if comparison.eval_output:
        compared.append("the output in eval mode")
    return f"over {', '.join(compared)}" if compared else ""


def distance_with_largest(diff: TensorDiff) -> str:
    """The distance in words, and the largest difference if all numbers are finite."""
    words = distance_in_words(diff)
    if diff.max_abs is None or diff.relative_norm is None or diff.n_nonfinite:
        return words
    return f"{words}, largest difference {diff.max_abs:.2g}"
