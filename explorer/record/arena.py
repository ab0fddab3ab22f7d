"""Planners side by side: what each chose under each budget, what was foreseen of it, and what a real run said."""

from __future__ import annotations

from typing import Any

from explorer.record.base import Record
from explorer.record.comparison import Verdict
from explorer.record.failure import Failure
from explorer.record.measurement import Environment
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.record.times import Samples


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
    """The step with everything kept, taken in turns with those of `step`."""
    time_ratio: float | None = None
    """Median of the paired ratios."""
    time_ratio_spread: float | None = None
    verdict: Verdict | None = None
    """Against everything kept; None: not judged."""
    worst: str = ""
    """The tensor furthest from equal, with its distance."""
    failure: Failure | None = None

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
        return {"fits": self.fits, "ran": self.ran}


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
        """Bouts of `name` with the rival that was faster within the same budget, outside of the spread of both."""
        own = {bout.share: bout for bout in self.bouts if bout.rival == name and bout.share is not None}
        return tuple(
            (mine, other)
            for share, mine in own.items()
            for other in self.bouts
            if other.rival != name and other.share in (share, None) and _beats(other, mine)
        )


def _beats(other: Bout, mine: Bout) -> bool:
    """A rival that misses the budget or moves the gradient has not won anything."""
    budget = mine.budget_bytes
    if budget is None or other.verdict not in ("bitwise equal", "rounding"):
        return False
    if other.step_peak_bytes is None or other.step_peak_bytes > budget:
        return False
    if not mine.fits:
        return True
    if mine.policy is not None and other.policy == mine.policy:
        return False
    if other.time_ratio is None or mine.time_ratio is None:
        return False
    spread = (other.time_ratio_spread or 0.0) + (mine.time_ratio_spread or 0.0)
    return other.time_ratio + spread < mine.time_ratio
