"""Planners side by side: what each chose under each budget, what was foreseen of it, and what a real run said."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from explorer.record.base import Record
from explorer.record.diffs import Verdict
from explorer.record.failure import Failure
from explorer.record.measurement import Environment
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.record.times import Samples, ratio_interval, ratio_with_spread

ARENA_REPEATS = 9
"""Timed steps of a bout, where nobody says: fewer than eight cannot say BEYOND_DOUBT who is faster."""
BEYOND_DOUBT = 0.99
"""Probability that the faster of two is, on both sides together."""
Standing = Literal["ahead", "undecided", "beaten"]
"""Of one bout beside another."""


class Bout(Record):
    """One rival under one budget. What was not reached is None, and `why` or `failure` says why."""

    rival: str
    share: float | None = None
    """The budget as a share of the peak with everything kept; None: the rival knows no budget."""
    budget_bytes: int | None = None
    policy: Policy | None = None
    """What it chose; None: nothing, or it changes the model in a way that no policy says."""
    why: str = ""
    """Why it cannot run here, or found nothing, in one sentence; of a bout that ran, what is worth knowing about it."""
    predicted_peak_bytes: int | None = None
    """By the forecast, of a policy; by the rival itself where it has a forecast of its own."""
    predicted_time_ratio: float | None = None
    step_peak_bytes: int | None = None
    step: Samples = Samples()
    baseline_step: Samples = Samples()
    """The step with everything kept, taken in turns with those of `step`. Those of policies all come of the same turns:
    the i-th steps of two bouts lie in one round."""
    time_ratio: float | None = None
    """Median of the paired ratios."""
    time_ratio_spread: float | None = None
    verdict: Verdict | None = None
    """Against everything kept; None: not judged."""
    worst: str = ""
    """The tensor furthest from equal, with its distance."""
    failure: Failure | None = None

    def with_times(self, step: Samples, baseline_step: Samples) -> Bout:
        """With the ratio of both, where there are two pairs."""
        ratio, spread = ratio_with_spread(step, baseline_step) or (None, None)
        return msgspec.structs.replace(
            self, step=step, baseline_step=baseline_step, time_ratio=ratio, time_ratio_spread=spread
        )

    @property
    def time_interval(self) -> tuple[float, float] | None:
        """Where the true median of the paired ratios lies, 19 times in 20; None: below six pairs."""
        return ratio_interval(self.step, self.baseline_step)

    @property
    def fits(self) -> bool | None:
        """Whether the measured peak keeps the budget; None without either."""
        if self.budget_bytes is None or self.step_peak_bytes is None:
            return None
        return self.step_peak_bytes <= self.budget_bytes

    @property
    def ran(self) -> bool:
        return self.step_peak_bytes is not None

    def headlines(self) -> dict[str, Any]:
        """The derived figures `--json` prints beside the record."""
        return {"fits": self.fits, "ran": self.ran, "time_interval": self.time_interval}


class Ground(Record):
    """What the step holds with everything kept, which budgets are shares of."""

    peak_bytes: int
    saved_bytes: int
    """Saved activations when forward ends."""
    is_measured: bool
    """False: put together from a run with recompute, as the step with everything kept does not fit."""


class Arena(Record):
    """Every bout on one model."""

    spec: RunSpec
    environment: Environment
    ground: Ground
    bouts: tuple[Bout, ...]

    def beaten(self, name: str) -> tuple[tuple[Bout, Bout], ...]:
        """Bouts of `name`, each with a rival that beyond doubt did better within the same budget."""
        return self._against(name, "beaten")

    def undecided(self, name: str) -> tuple[tuple[Bout, Bout], ...]:
        """Bouts of `name`, each with a rival that was faster in the middle; more repeats would tell whether it is."""
        return self._against(name, "undecided")

    def _against(self, name: str, how: Standing) -> tuple[tuple[Bout, Bout], ...]:
        own = {bout.share: bout for bout in self.bouts if bout.rival == name and bout.share is not None}
        return tuple(
            (mine, other)
            for share, mine in own.items()
            for other in self.bouts
            if other.rival != name and other.share in (share, None) and _standing(mine, other) == how
        )


def _standing(mine: Bout, other: Bout) -> Standing:
    """A rival that misses the budget or moves the gradient has not won anything, nor has one that chose the same."""
    budget = mine.budget_bytes
    if budget is None or other.verdict not in ("bitwise equal", "rounding"):
        return "ahead"
    if other.step_peak_bytes is None or other.step_peak_bytes > budget:
        return "ahead"
    if not mine.fits:
        return "beaten"
    if mine.policy is not None and other.policy == mine.policy:
        return "ahead"
    return _slower_in_turns(mine, other) if _took_turns(mine, other) else _slower_apart(mine, other)


def _took_turns(mine: Bout, other: Bout) -> bool:
    return mine.policy is not None and other.policy is not None and mine.baseline_step == other.baseline_step


def _slower_in_turns(mine: Bout, other: Bout) -> Standing:
    """By pairs of steps that lie in one round."""
    ratio, interval = ratio_with_spread(other.step, mine.step), ratio_interval(other.step, mine.step, BEYOND_DOUBT)
    if ratio is None or ratio[0] >= 1:
        return "ahead"
    return "beaten" if interval is not None and interval[1] < 1 else "undecided"


def _slower_apart(mine: Bout, other: Bout) -> Standing:
    """By what each takes over everything kept, which is all that is known of steps of different processes."""
    if other.time_ratio is None or mine.time_ratio is None or other.time_ratio >= mine.time_ratio:
        return "ahead"
    theirs, ours = other.time_interval, mine.time_interval
    return "beaten" if theirs and ours and theirs[1] < ours[0] else "undecided"
