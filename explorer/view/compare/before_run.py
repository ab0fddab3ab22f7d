"""Headline figures that a run has not brought yet: of the baseline, forecast for the drawn policy, or of a part.

headline.py has the figures of whole runs.
"""

from __future__ import annotations

from dataclasses import replace

from explorer.record.base import Origin
from explorer.record.comparison import Comparison
from explorer.record.graph import Hazard
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast
from explorer.view.compare.headline import bytes_headline, danger, errors, headlines
from explorer.view.drawing.units import NOT_MEASURED, count, median_ms, mib, percent, time_ratio
from explorer.view.text import explore as glossary
from explorer.view.text.explore import Headline

MEASURED: tuple[Origin, ...] = ("measured",)
COUNTED: tuple[Origin, ...] = ("counted",)
PREDICTED: tuple[Origin, ...] = ("predicted",)
PRESS = "press Run"


def headlines_of_part(part: Comparison, *, goes_on: bool) -> tuple[Headline, ...]:
    """The headlines of recorded steps whose times, and perhaps gradients, the run has still to bring."""
    missing = {"time_ratio": ("being timed", NOT_MEASURED)}
    if not part.gradients:
        missing["verdict"] = ("being compared", "not compared")

    shown = []
    for headline in headlines(part):
        if headline.key in missing:
            under_way, never = missing[headline.key]
            headline = Headline(key=headline.key, value=never, delta=PRESS)
            if goes_on:
                headline = Headline(key=headline.key, value=under_way)
        shown.append(headline)
    return tuple(shown)


def bytes_before_run(key: str, base: int | None, predicted: int | None, of_base: str) -> Headline:
    """Bytes of the baseline, and those predicted for the drawn policy."""
    if base is None:
        return Headline(key=key, value=NOT_MEASURED)
    if predicted is None:
        return Headline(key=key, value=mib(base), delta=of_base, origin=MEASURED)
    headline = bytes_headline(key, base, predicted, predicted=True)
    return headline if predicted != base else replace(headline, delta="no change")


def flops_before_run(ratio: float | None, *, is_base: bool) -> Headline:
    """`is_base`: the drawn policy is the known baseline, which recomputes nothing."""
    if ratio is not None:
        value = f"≈ {percent(ratio - 1, signed=True)}"
        return Headline(key="flop_ratio", value=value, delta="recomputed", origin=PREDICTED)
    if is_base:
        return Headline(key="flop_ratio", value="+0 %", delta="nothing recomputed", origin=COUNTED)
    return Headline(key="flop_ratio", value=NOT_MEASURED, delta=PRESS)


def gradients_before_run(hazards: tuple[Hazard, ...]) -> Headline:
    """The verdict before a comparison; known errors are shown before a run."""
    wrong = errors(hazards)
    if not wrong:
        return Headline(key="verdict", value="not compared", delta=PRESS)
    n_errors = count(len(wrong), "known error")
    return Headline(key="verdict", value="not safe", delta=n_errors, tone="bad", tooltip=danger(hazards))


def time_before_run(base: Measurement | None, forecast: Forecast, of_base: str) -> Headline:
    median, ratio = base.times.step.median_ms if base and base.times else None, forecast.time_ratio
    if median is None:
        return Headline(key="time_ratio", value=NOT_MEASURED, delta=PRESS)
    if ratio is None:
        return Headline(key="time_ratio", value=median_ms(median), delta=of_base, origin=MEASURED)
    return Headline(
        key="time_ratio",
        value=f"≈ {time_ratio(ratio, forecast.time_ratio_spread)}",
        delta=f"≈ {median_ms(ratio * median)}",
        origin=PREDICTED,
        tooltip=f"{glossary.HEADLINES['time_ratio']} {glossary.TIME_PREDICTED}",
    )
