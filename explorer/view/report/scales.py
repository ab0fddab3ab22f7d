"""Where a value stands on a drawing: one axis of numbers or of names, with its round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

N_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One axis. Names stand at 0, 1, 2, ...; `low` and `high` are the values at its two ends."""

    low: float
    high: float
    start: float = 0.0
    """Pixels of `low`, and of `high` below."""
    end: float = 1.0
    names: tuple[str, ...] = ()
    tick_values: tuple[float, ...] = ()
    tick_texts: tuple[str, ...] = ()
    suffix: str = ""
    """Behind each number."""

    def value(self, held: Any) -> float | None:
        """What was drawn, as a number on this axis; None where nothing was."""
        if held is None:
            return None
        if self.names:
            return float(self.names.index(str(held)))
        return None if isinstance(held, float) and math.isnan(held) else float(held)

    def at(self, held: Any) -> float:
        """Pixels."""
        value = self.value(held)
        assert value is not None, "gaps are drawn by nobody"
        return self.pixels(value)

    def pixels(self, value: float) -> float:
        """The same for a number that was read off the scale already."""
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def between(self, start: float, end: float) -> Scale:
        """The same axis from pixel `start` to pixel `end`."""
        return replace(self, start=start, end=end)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, text) of each."""
        if self.names:
            return [(float(i), name) for i, name in enumerate(self.names)]
        if self.tick_values:
            return list(zip(self.tick_values, self.tick_texts))
        return [(value, f"{_number(value)}{self.suffix}") for value in rounds(self.low, self.high)]


def scale_of(axis: Any, held: Iterable[Any], *, bars: bool = False) -> Scale:
    """For Plotly's layout of an axis and everything that is drawn along it; `bars` start at zero."""
    values = [value for value in held if value is not None]
    if axis.type == "category" or any(isinstance(value, str) for value in values):
        order = [*(axis.categoryarray if axis.categoryarray is not None else ()), *map(str, values)]
        names = tuple(name for name in dict.fromkeys(order) if name in {str(value) for value in values})
        return Scale(low=-0.5, high=max(len(names), 1) - 0.5, names=names)
    numbers = [float(value) for value in values if math.isfinite(float(value))]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if axis.rangemode == "tozero" or bars:
        low, high = min(low, 0.0), max(high, 0.0)
        high += 0.04 * (high - low)
    if axis.range is not None:
        low, high = map(float, axis.range)
    given = [float(value) for value in axis.tickvals] if axis.tickvals is not None else []
    suffix = axis.ticksuffix or ""
    texts = list(axis.ticktext) if axis.ticktext is not None else [_number(value) for value in given]
    return Scale(low=low, high=high or 1.0, tick_values=tuple(given), tick_texts=tuple(map(str, texts)), suffix=suffix)


def rounds(low: float, high: float) -> Sequence[float]:
    """About N_TICKS round numbers between two.

    >>> rounds(0, 42)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / N_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"
