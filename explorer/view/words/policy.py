"""A policy in a few words, for a title."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from explorer.plan.names import operator_word, some
from explorer.record.plan import Forecast
from explorer.record.policy import Action, Policy, Unit
from explorer.view.drawing.units import change, count, percent

_DONE: dict[Action, str] = {"recompute": "recompute", "save_ops": "recompute", "offload": "offload"}


def in_words(policy: Policy) -> str:
    """`recompute 12 blocks: blocks.0 ... blocks.11`, by what is done with them."""
    alike: dict[tuple[str, tuple[str, ...]], list[Unit]] = defaultdict(list)
    for unit in policy.units:
        alike[unit.action, unit.save_ops].append(unit)
    return "; ".join(_units(units) for units in alike.values()) or "keep all"


def _units(units: Sequence[Unit]) -> str:
    """Of one action. A planner lists segments first, and a reader takes `a ... z` for a stretch: names are sorted."""
    named = sorted((fqn for unit in units for fqn in unit.blocks), key=_counted)
    listed = ", ".join(named) if len(named) <= 4 else f"{named[0]} ... {named[-1]}"
    segments = sum(len(unit.blocks) > 1 for unit in units)
    joined = f" in {count(len(units), 'unit')}" if segments else ""
    first = units[0]
    kept = f" but keep {some(tuple(dict.fromkeys(map(operator_word, first.save_ops))))}" if first.save_ops else ""
    return f"{_DONE[first.action]} {count(len(named), 'block')}{joined}{kept}: {listed}"


def _counted(fqn: str) -> list[tuple[bool, int, str]]:
    """By which `blocks.9` stands in front of `blocks.10`."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in fqn.split(".")]


def expected(forecast: Forecast, baseline_peak_bytes: int | None) -> str:
    """`≈ −40 % peak, ×1.16 time`: what a policy should do to the baseline; the empty string: nothing can be said."""
    moved = change(baseline_peak_bytes, forecast.step_peak_bytes)
    peak = "" if moved is None else f"{percent(moved, signed=True)} peak"
    time = "" if forecast.time_ratio is None else f"×{forecast.time_ratio:.2f} time"
    return f"≈ {', '.join(filter(None, (peak, time)))}" if peak or time else ""
