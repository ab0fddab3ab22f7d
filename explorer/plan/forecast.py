"""A whole policy played through a measured baseline: below the time that a person notices, before anything runs.

A block inside a recomputed one counts with it. See changes.py for what is played, stays.py for what is not foreseen.
"""

from __future__ import annotations

import numpy as np

from explorer.plan.changes import changes_of, joined, peak_with, stash_bytes
from explorer.plan.replay import Replay
from explorer.plan.rerun import rerun_flops
from explorer.plan.stays import Stay, stays_of
from explorer.record.forecast import Forecast
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


class Forecaster:
    """Holds one baseline sorted for replay, and what each unit of it would free; built once, asked at every toggle."""

    def __init__(self, baseline: Measurement, graph: ModelGraph | None = None) -> None:
        self._baseline = baseline
        self._graph = graph
        self._replay = Replay.of(baseline, graph)
        self._stays: dict[tuple[tuple[str, ...], bool], list[Stay]] = {}

    def forecast(self, policy: Policy) -> Forecast:
        """What `policy` should do to the baseline; of units that save operators or offload it says nothing."""
        if any(unit.action != "recompute" for unit in policy.units):
            return Forecast()
        replay, baseline = self._replay, self._baseline
        if replay is None:
            return Forecast(flop_ratio=self._flop_ratio(policy))
        units = {unit: self._of(replay, unit, stops_early=policy.stops_early) for unit in outermost(policy)}
        stays = [stay for own in units.values() for stay in own]
        played = changes_of(replay, stays, baseline.forward_end_tick, stash_bytes=stash_bytes(baseline, policy))
        freed: dict[str, int] = {}
        for unit, own in units.items():
            entries = joined([stay.entries for stay in own])
            freed |= {fqn: replay.born_in(fqn, entries[played.away[entries]]) for fqn in unit}
        saved = baseline.saved_after_forward_bytes
        return Forecast(
            step_peak_bytes=peak_with(replay, played.changes, stays) if stays else int(np.max(replay.line)),
            saved_after_forward_bytes=None if saved is None else saved + played.saved_bytes,
            flop_ratio=self._flop_ratio(policy),
            freed_bytes=freed,
        )

    def _of(self, replay: Replay, unit: tuple[str, ...], *, stops_early: bool) -> list[Stay]:
        if (unit, stops_early) not in self._stays:
            self._stays[unit, stops_early] = stays_of(replay, unit, stops_early=stops_early)
        return self._stays[unit, stops_early]

    def _flop_ratio(self, policy: Policy) -> float | None:
        total = self._baseline.total_flops
        again = (rerun_flops(self._baseline, self._graph, unit, policy) for unit in outermost(policy))
        return 1 + sum(again) / total if total else None


def outermost(policy: Policy) -> tuple[tuple[str, ...], ...]:
    """The blocks of each unit that the policy names, without those inside another unit's."""
    named = set(policy.blocks)
    found = (tuple(fqn for fqn in unit.blocks if named.isdisjoint(_above(fqn))) for unit in policy.units)
    return tuple(unit for unit in dict.fromkeys(found) if unit)


def _above(fqn: str) -> list[str]:
    """Every ancestor's fqn, the model's included."""
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[:n]) for n in range(len(parts))]
