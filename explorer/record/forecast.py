"""What a policy should do before anybody runs it."""

from __future__ import annotations

from explorer.record.base import Record


class Forecast(Record):
    """Predicted from a measured baseline; None: cannot be said."""

    step_peak_bytes: int | None = None
    saved_after_forward_bytes: int | None = None
    flop_ratio: float | None = None
    """FLOPs of the step over those of the baseline; an upper bound, early stop skips some."""
    time_ratio: float | None = None
    """Step time over the baseline's."""
    time_ratio_spread: float | None = None
    """Half the width of the interval around it that nine of ten runs should lie in."""
    time_ratio_of_calls: float | None = None
    """The part of it that torch.utils.checkpoint takes itself, call by call."""
    freed_bytes: dict[str, int] = {}
    """How much less each recomputed block saves."""
