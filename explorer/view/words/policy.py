"""A policy in a few words, for a title."""

from __future__ import annotations

from explorer.record.forecast import Forecast
from explorer.record.policy import Policy
from explorer.view.drawing.units import change, count, percent


def in_words(policy: Policy) -> str:
    """`recompute 12 blocks: blocks.0 ... blocks.11`."""
    if not policy.units:
        return "keep all"
    named = policy.blocks
    listed = ", ".join(named) if len(named) <= 4 else f"{named[0]} ... {named[-1]}"
    segments = sum(len(unit.blocks) > 1 for unit in policy.units)
    joined = f" in {count(len(policy.units), 'unit')}" if segments else ""
    return f"recompute {count(len(named), 'block')}{joined}: {listed}"


def expected(forecast: Forecast, baseline_peak_bytes: int | None) -> str:
    """`≈ −40 % peak, ×1.16 time`: what a policy should do to the baseline; the empty string: nothing can be said."""
    moved = change(baseline_peak_bytes, forecast.step_peak_bytes)
    peak = "" if moved is None else f"{percent(moved, signed=True)} peak"
    time = "" if forecast.time_ratio is None else f"×{forecast.time_ratio:.2f} time"
    return f"≈ {', '.join(filter(None, (peak, time)))}" if peak or time else ""
