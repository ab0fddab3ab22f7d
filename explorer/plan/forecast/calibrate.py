"""Step times that are foreseen, brought to what whole steps under other policies really took.

What runs again is foreseen block by block, and all blocks of a model are off alike: in what memory and caches the
second forward finds. One or two whole steps in turns with everything kept say by how much. The more a step was foreseen
to take and the steadier its clock, the more its word counts against what is assumed without any: none is off.

What stays unknown is as wide as steps of one model lie apart, those that were seen or else those of the samples. A
policy of many small units is less known by a step of few large ones: by the share that the calls take more in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from explorer.plan.forecast.rerun_time import CALL_ERROR, NINE_OF_TEN, RERUN_ERROR
from explorer.record.plan import Forecast

LEFT_ERROR = 0.1
"""Standard error that stays between policies of one model, as a share of what running again takes."""


class TimedStep(NamedTuple):
    """A policy's step: as it was foreseen from the baseline alone, and as it was measured in turns with that."""

    foreseen: float
    measured: float
    error: float
    """Standard error of `measured`."""
    calls: float = 0.0
    """The part of `foreseen` that checkpoints take themselves."""


def calibrated(forecast: Forecast, seen: Iterable[TimedStep]) -> Forecast:
    """The same, with the time of what runs again taken so many times as in the steps that were seen."""
    ratio = forecast.time_ratio
    known = [one for one in seen if one.foreseen > 1]
    if ratio is None or not known:
        return forecast
    factors = [(one.measured - 1) / (one.foreseen - 1) for one in known]
    counts = [1 / ((one.error / (one.foreseen - 1)) ** 2 + LEFT_ERROR**2) for one in known]
    weight = sum(counts) + RERUN_ERROR**-2
    factor = max(0.0, (sum(count * times for count, times in zip(counts, factors)) + RERUN_ERROR**-2) / weight)
    apart = max(LEFT_ERROR * factor, statistics.stdev(factors) if len(factors) > 1 else 0.0)
    calls_seen = statistics.mean(one.calls / (one.foreseen - 1) for one in known)
    more_calls = CALL_ERROR * ((forecast.time_ratio_of_calls or 0.0) - (ratio - 1) * calls_seen)
    clock = statistics.mean(one.error for one in known)
    error = math.hypot(clock, (ratio - 1) * math.hypot(apart, weight**-0.5), more_calls)
    return msgspec.structs.replace(forecast, time_ratio=1 + (ratio - 1) * factor, time_ratio_spread=NINE_OF_TEN * error)
