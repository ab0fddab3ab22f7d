"""The strip of headline figures: the policy's savings, its cost, and whether the gradient is the same."""

from __future__ import annotations

from dataclasses import replace

from explorer.plan.names import recomputed_blocks
from explorer.record.comparison import Comparison
from explorer.record.graph import Hazard
from explorer.record.measurement import Measurement, ratio_with_spread
from explorer.view.compare.cost import doubt_of_ratio, uncounted_in_words
from explorer.view.drawing.units import (
    NOT_MEASURED,
    change,
    count,
    flops,
    from_to,
    mib,
    milliseconds,
    percent,
    time_ratio,
)
from explorer.view.text.explore import HEADLINES, Headline, Tone
from explorer.view.text.runs import peak_and_end, peak_in_words, peaks_in_words, who_failed


def headlines(run: Comparison | Measurement) -> tuple[Headline, ...]:
    """The figures of the strip, in order: peak, saved, FLOPs, time, and for a comparison gradients and policy."""
    figures = _of_one(run) if isinstance(run, Measurement) else _of_two(run)
    if isinstance(run, Comparison) and run.is_predicted:
        figures = tuple(map(_predicted, figures))
    return tuple(replace(headline, origin=()) if headline.value == NOT_MEASURED else headline for headline in figures)


def _predicted(figure: Headline) -> Headline:
    """The figure marked as predicted; the verdict becomes `not compared`, as there are no gradients."""
    if figure.key == "verdict":
        return replace(figure, value="not compared", delta="nothing ran", tone="neutral", origin=())
    return replace(figure, origin=("predicted",))


def _of_two(run: Comparison) -> tuple[Headline, ...]:
    if not run.comparable:
        return _of_a_failed_pair(run)
    base, cand = run.baseline, run.candidate
    return (
        replace(
            bytes_headline("step_peak_bytes", base.step_peak_bytes, cand.step_peak_bytes),
            tooltip=_peak_tooltip(cand),
        ),
        bytes_headline(
            "saved_after_forward_bytes", base.saved_after_forward_bytes, cand.saved_after_forward_bytes
        ),
        _flops(base, cand),
        _time(base, cand),
        _gradients(run),
        _policy(cand),
    )  # fmt: skip


def _of_a_failed_pair(run: Comparison) -> tuple[Headline, ...]:
    """The six headlines of a failed pair, without arrows, ratios or figures of a partial step."""
    base, cand = run.baseline, run.candidate
    peak = Headline(
        key="step_peak_bytes", value=peak_in_words(cand), origin=("measured",), delta=f"baseline {peak_and_end(base)}"
    )
    unknown = (
        Headline(key=key, value=NOT_MEASURED) for key in ("saved_after_forward_bytes", "flop_ratio", "time_ratio")
    )
    return (peak, *unknown, replace(_gradients(run), delta=who_failed(run), tone="bad"), _policy(cand))


def _of_one(run: Measurement) -> tuple[Headline, ...]:
    plain = [
        ("step_peak_bytes", peak_and_end(run), _peak_tooltip(run)),
        ("saved_after_forward_bytes", mib(run.saved_after_forward_bytes), ""),
        ("total_flops", flops(run.total_flops), _tooltip("flop_ratio", uncounted_in_words(run))),
        ("step_ms", milliseconds(run.step_times), HEADLINES["time_ratio"]),
    ]
    figures = [
        Headline(
            key=key, value=value, tooltip=tooltip,
            origin=("counted",) if key == "total_flops" and run.origin != "predicted" else (run.origin,),
        )
        for key, value, tooltip in plain
    ]  # fmt: skip
    if run.spec.policy.units:
        figures.append(_policy(run))
    return tuple(figures)


def _peak_tooltip(run: Measurement) -> str:
    peaks = peaks_in_words(run)
    return _tooltip("step_peak_bytes", peaks and f"The {peaks}")


def _tooltip(key: str, note: str) -> str:
    """The meaning of a figure, and the note of this run if it has one."""
    return HEADLINES[key] + (note and f" {note}.")


def bytes_headline(key: str, old: int | None, new: int | None, *, predicted: bool = False) -> Headline:
    """`206.1 → 56.2 MiB` with the change in percent."""
    moved = change(old, new)
    return Headline(
        key=key,
        value=from_to(old, new, f" → {'≈ ' * predicted}"),
        delta="no ratio" if moved is None else percent(moved, signed=True),
        tone=_tone(moved),
        origin=("predicted",) if predicted else ("measured",),
    )


def _tone(moved: float | None) -> Tone:
    """Bad if the figure grew, good if it went down."""
    if not moved:
        return "neutral"
    return "bad" if moved > 0 else "good"


def _flops(base: Measurement, cand: Measurement) -> Headline:
    moved = change(base.total_flops, cand.total_flops)
    return Headline(
        key="flop_ratio",
        value=percent(moved, signed=True),
        delta=f"{flops(cand.recompute_flops)} recomputed" if cand.recompute_flops is not None else "",
        tone=_tone(moved),
        origin=("counted",),
        tooltip=_tooltip("flop_ratio", uncounted_in_words(cand)),
    )


def _time(base: Measurement, cand: Measurement) -> Headline:
    old, new = base.step_times, cand.step_times
    ratio = ratio_with_spread(new, old)
    if ratio is None:
        return Headline(key="time_ratio", value=NOT_MEASURED)
    doubt = doubt_of_ratio(new, old)
    return Headline(
        key="time_ratio",
        value=time_ratio(*ratio),
        delta=doubt or milliseconds(new),
        tone="neutral" if doubt else _tone(ratio[0] - 1),
        origin=("measured",),
    )


def _gradients(run: Comparison) -> Headline:
    tone: dict[str, Tone] = {
        "bitwise equal": "good", "rounding": "neutral", "state moved": "bad", "different": "bad"
    }  # fmt: skip
    return Headline(
        key="verdict",
        value=run.verdict,
        delta=_how_many(run),
        tone="bad" if run.untrained else tone.get(run.verdict, "neutral"),
        origin=("measured",),
    )


def _how_many(run: Comparison) -> str:
    """Number of equal gradients if all are equal, else of differing gradients; with the total."""
    n, n_equal = run.n_gradients, run.n_bitwise_equal
    if run.verdict == "not comparable" or not n:
        return ""
    words = f"{n - n_equal:,} of {count(n, 'tensor')} differ"
    if n_equal == n:
        words = f"{n:,} of {count(n, 'tensor')} equal"
        if run.verdict in ("different", "rounding"):
            words += " in the first step"
    return words + _untrained(run)


def _untrained(run: Comparison) -> str:
    return f", {len(run.untrained):,} more without a gradient" if run.untrained else ""


def _policy(run: Measurement) -> Headline:
    named = recomputed_blocks(run.spec.policy)
    again = sum(1 for fqn in named if fqn in run.by_fqn and run.by_fqn[fqn].n_recompute)
    return Headline(
        key="n_recompute",
        value=f"{again} of {count(len(named), 'block')}" if run.blocks else NOT_MEASURED,
        delta=", ".join(filter(None, (_effect(run, again, len(named)), _offloaded(run)))),
        tone="bad" if run.blocks and again < len(named) else "neutral",
        origin=("counted",),
    )


def _offloaded(run: Measurement) -> str:
    """`3 blocks offloaded, 2.1 MiB on the host`; empty if none is."""
    n_blocks = sum(len(unit.blocks) for unit in run.spec.policy.units if unit.action == "offload")
    if not n_blocks:
        return ""
    return f"{count(n_blocks, 'block')} offloaded, {mib(run.peaks.offloaded_peak_bytes)} on the host"


def _effect(run: Measurement, n_again: int, n_named: int) -> str:
    if not run.blocks or n_again == n_named:
        return ""
    if run.failure is not None:
        return "until it failed"
    return "in part" if n_again else "policy without effect"


TRUSTED = ("bitwise equal", "rounding")
"""Verdicts of a file's evidence that need no word of warning."""


def errors(fired: tuple[Hazard, ...]) -> tuple[Hazard, ...]:
    """Hazards that make the run wrong or refused with certainty."""
    return tuple(hazard for hazard in fired if hazard.severity == "error")


def danger(fired: tuple[Hazard, ...], tab: str = "Gradients") -> str:
    """The first error with its remedy, and how many more there are in that tab; the empty string: none is known."""
    wrong = errors(fired)
    if not wrong:
        return ""
    words = f"Known before any run: {wrong[0].sentence} {wrong[0].remedy}"
    if len(wrong) > 1:
        words += f" {count(len(wrong) - 1, 'more error')} in the tab {tab}."
    return words


def warning_lines(fired: tuple[Hazard, ...]) -> str:
    """Comment lines for a file that carries the policy away; a name cannot end the comment, nor name an encoding."""
    lines = [f"#   {' '.join(f'{hazard.sentence} {hazard.remedy}'.split())}\n" for hazard in errors(fired)]
    return "".join(["# WARNING\n", "# Known to go wrong before any run:\n", *lines]) if lines else ""


def doubt(verdict: str | None) -> str:
    """A warning if the evidence in a policy file speaks against the policy; else the empty string."""
    if verdict is None or verdict in TRUSTED:
        return ""
    return f"The evidence in this policy file says: {verdict}. Run it here before you use it."
