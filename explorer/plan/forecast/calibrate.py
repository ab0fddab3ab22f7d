"""Step times that are foreseen, brought to what whole steps under other policies really took.

What runs again is foreseen block by block, and all blocks of a model are off alike: in what memory and caches the
second forward finds. One or two whole steps in turns with everything kept say by how much. The more a step was foreseen
to take and the steadier its clock, the more its word counts against what is assumed without any: none is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from explorer.plan.forecast.rerun_time import NINE_OF_TEN
from explorer.record.forecast import Forecast

LEFT_ERROR = 0.1
"""Standard error that stays between policies of one model, as a share of what running again takes."""
USUALLY_OFF = 0.3
"""Standard deviation between models of what running again takes over what was foreseen."""


class TimedStep(NamedTuple):
    """A policy's step: as it was foreseen from the baseline alone, and as it was measured in turns with that."""

    foreseen: float
    measured: float
    error: float
    """Standard error of `measured`."""


def calibrated(forecast: Forecast, seen: Iterable[TimedStep]) -> Forecast:
    """The same, with the time of what runs again taken so many times as in the steps that were seen."""
    ratio = forecast.time_ratio
    known = [one for one in seen if one.foreseen > 1]
    if ratio is None or not known:
        return forecast
    weight, times = 1 / USUALLY_OFF**2, 1 / USUALLY_OFF**2
    for one in known:
        share = one.foreseen - 1
        counts = 1 / ((one.error / share) ** 2 + LEFT_ERROR**2)
        weight += counts
        times += counts * (one.measured - 1) / share
    factor = max(0.0, times / weight)
    clock = sum(one.error for one in known) / len(known)
    error = math.hypot(clock, (ratio - 1) * math.hypot(LEFT_ERROR, weight**-0.5))
    return msgspec.structs.replace(forecast, time_ratio=1 + (ratio - 1) * factor, time_ratio_spread=NINE_OF_TEN * error)
