"""What would make a step fit: single levers and combinations of them, each played as a step, priced and judged."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Count, Record
from explorer.record.run import RunSpec

Effect = Literal["bitwise", "rounding", "different", "not judged"]
"""What a lever does to gradients and to the trained parameters after two steps, from the best to unknown."""


class PlayedStep(Record):
    """The memory and the cost of a step that was played without data."""

    spec: RunSpec
    step_peak_bytes: Count
    allocated_bytes: Count | None = None
    """Allocated peak on the card if the card had no end; None: no card."""
    reserved_bytes: Count | None = None
    """Reserved peak on the card if the card had no end; None: no card."""
    total_flops: Count | None = None
    fits: bool = True
    """Within the budget, and granted by the card."""
    host_peak_bytes: Count | None = None
    """As of the Forecast, and so is the next; None: nothing is offloaded."""
    moved_bytes: Count | None = None

    @property
    def needed_bytes(self) -> int:
        """The figure that is compared with the budget: reserved on a card, else the peak."""
        return self.step_peak_bytes if self.reserved_bytes is None else self.reserved_bytes


class Judgement(Record):
    """The comparison of a real step under a lever with the step as it is."""

    effect: Effect = "not judged"
    distance: float | None = None
    """|candidate - baseline| / |baseline| of the tensor that is furthest from equal."""
    reason: str = ""
    """What differs, or why nothing was judged."""


class LeverRow(Record):
    """One lever, or several together, and the step under them."""

    levers: tuple[str, ...]
    """Keys of the levers, see plan/levers.py."""
    step: PlayedStep
    judgement: Judgement = Judgement()


class LeftOut(Record):
    """A lever that was not offered."""

    lever: str
    reason: str


class Fit(Record):
    """The step as it is, and the levers that lower its peak."""

    as_is: PlayedStep
    budget_bytes: Count | None = None
    """Limit of the peak; None: the card alone, else the memory of this machine. A card must grant every request."""
    batch: str = ""
    rows: tuple[LeverRow, ...] = ()
    """Single levers, ranked."""
    combinations: tuple[LeverRow, ...] = ()
    """Combinations that fit, ranked; none of them is worse than another in price and gradients."""
    left_out: tuple[LeftOut, ...] = ()
    logits: str = ""
    """The last layer, and the line of the user's code that calls it; empty: the model does more with its output."""
    judged_on: RunSpec | None = None
    """The step that was run to judge; None: no size of the model could be run here."""
    warnings: tuple[str, ...] = ()
    missing: str = ""
    """What the answer lacks because the fit was cut off; empty: nothing."""
