"""A whole policy played through a measured baseline: below the time that a person notices, before anything runs.

Every recomputed block's own saved bytes leave the timeline between the end of its forward and the start of its
backward, as in price.py, but of all blocks together. A segment counts as its blocks; a block inside a recomputed one
counts with it. What recompute leaves behind in kernels, and early stop, are not foreseen: that is why Run exists.
"""

from __future__ import annotations

import numpy as np

from explorer.plan.price import Replay, Stay, stays_of
from explorer.plan.series import is_within
from explorer.record.forecast import Forecast
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


class Forecaster:
    """Holds one baseline sorted for replay, and what each block of it would free; built once, asked at every toggle."""

    def __init__(self, baseline: Measurement) -> None:
        log = baseline.allocations
        self._baseline = baseline
        self._replay = Replay.of(baseline, log) if log is not None and baseline.phases and len(log.n_bytes) else None
        self._stays: dict[str, tuple[Stay, ...]] = {}

    def forecast(self, policy: Policy) -> Forecast:
        """What `policy` should do to the baseline's step; of blocks that save nothing it says nothing."""
        replay, baseline = self._replay, self._baseline
        if replay is None:
            return Forecast(flop_ratio=self._flop_ratio(policy))
        freed: dict[str, int] = {}
        stays: list[Stay] = []
        for fqn in outermost(policy):
            own = self._of(replay, fqn)
            freed[fqn] = sum(stay.n_bytes for stay in own)
            stays += own
        border, saved = baseline.forward_end_tick, baseline.saved_after_forward_bytes
        if border is not None and saved is not None:
            saved -= sum(stay.n_bytes for stay in stays if stay.first <= border + 1 and border < stay.end)
        return Forecast(
            step_peak_bytes=replay.peak_without(stays) if stays else int(np.max(replay.line)),
            saved_after_forward_bytes=saved,
            flop_ratio=self._flop_ratio(policy),
            freed_bytes=freed,
        )

    def _of(self, replay: Replay, fqn: str) -> tuple[Stay, ...]:
        if fqn not in self._stays:
            self._stays[fqn] = tuple(stays_of(self._baseline, replay, fqn))
        return self._stays[fqn]

    def _flop_ratio(self, policy: Policy) -> float | None:
        total = self._baseline.total_flops
        bills = [self._baseline.by_fqn[fqn] for fqn in outermost(policy) if fqn in self._baseline.by_fqn]
        return 1 + sum(bill.forward_flops for bill in bills) / total if total else None


def outermost(policy: Policy) -> tuple[str, ...]:
    """The blocks that the policy names, without those inside another one."""
    named = dict.fromkeys(policy.blocks)
    return tuple(fqn for fqn in named if not any(other != fqn and is_within(fqn, other) for other in named))
