"""What toggling one unit would do to the peak, and what it would cost: predicted from a measured timeline."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record


class Price(Record):
    """The effect on a measured run of toggling one unit, everything else unchanged."""

    blocks: tuple[str, ...]
    """The unit: one block, or the consecutive blocks of a segment."""
    toggle: Literal["recompute", "keep"]
    """What the unit would become."""
    peak_bytes: int
    """The step's peak then."""
    peak_change_bytes: int
    """Below zero: the peak sinks."""
    share_of_step_flops: float | None
    """FLOPs that toggling adds (or, for `keep`, takes away) as a share of the step's; None: not counted."""

    @property
    def mib_per_percent(self) -> float | None:
        """MiB of peak bought (recompute) or given up (keep) for one percent of the step's FLOPs.

        None where the FLOPs are unknown or none; zero: the toggle does not move the peak.
        """
        if not self.share_of_step_flops:
            return None
        moved = -self.peak_change_bytes if self.toggle == "recompute" else self.peak_change_bytes
        return moved / 1024**2 / (100 * self.share_of_step_flops)
