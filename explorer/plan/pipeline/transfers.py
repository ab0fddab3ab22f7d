"""The cost of links: the time from the end of an action to the start of the action that waited for its tensors.

A free rank whose neighbour is done waits only for the transfer. In a composed picture transfers take no time, and the
result is empty.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from explorer.plan.pipeline.rules import Triple, needs
from explorer.record.pipeline_run import ActionTime, PlayedSchedule


class Transfer(NamedTuple):
    """The wait of `rank` before one action, for what `source` sent."""

    source: int
    """Stage."""
    target: int
    rank: int
    start_ms: float
    end_ms: float

    @property
    def wait_ms(self) -> float:
        return self.end_ms - self.start_ms


class StageLink(NamedTuple):
    """All waits for one stage's sends to another."""

    source: int
    target: int
    n_waits: int
    wait_ms: float
    longest_ms: float


def transfers(forecast: PlayedSchedule) -> tuple[Transfer, ...]:
    """Every wait for a transfer between ranks, in order of its end."""
    times: dict[Triple, ActionTime] = {(time.stage, time.kind, time.microbatch): time for time in forecast.actions}
    n_stages = 1 + max((time.stage for time in forecast.actions), default=-1)
    free: defaultdict[int, float] = defaultdict(float)
    waits = []
    for time in sorted(forecast.actions, key=lambda one: one.start_ms):
        action: Triple = (time.stage, time.kind, time.microbatch)
        waited = [times[other] for either in needs(action, n_stages) for other in either if other in times]
        sent = max((one for one in waited if one.rank != time.rank), key=lambda one: one.end_ms, default=None)
        if sent is not None and (start := max(sent.end_ms, free[time.rank])) < time.start_ms:
            waits.append(Transfer(sent.stage, time.stage, time.rank, start, time.start_ms))
        free[time.rank] = time.end_ms
    return tuple(waits)


def links(forecast: PlayedSchedule) -> tuple[StageLink, ...]:
    """The waits by pair of stages, the most expensive first."""
    waits: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for one in transfers(forecast):
        waits[one.source, one.target].append(one.wait_ms)
    by_pair = [StageLink(*pair, len(each), sum(each), max(each)) for pair, each in waits.items()]
    return tuple(sorted(by_pair, key=lambda link: -link.wait_ms))
