"""What a caching allocator says of its own peaks, in words."""

from __future__ import annotations

from explorer.record.measurement import Measurement
from explorer.view.drawing.units import mib


def peaks_in_words(run: Measurement) -> str:
    """The allocator's own peaks, to stand beside the drawn one; the empty string where it has none."""
    own = run.peaks
    named = {
        "requested": own.requested_peak_bytes, "allocated": own.allocated_peak_bytes,
        "reserved": own.reserved_peak_bytes,
        "reserved once the cache is warm": own.steady_reserved_peak_bytes,
        "offloaded to the host": own.offloaded_peak_bytes or None,
    }  # fmt: skip
    peaks = ", ".join(f"{mib(n_bytes)} {name}" for name, n_bytes in named.items() if n_bytes is not None)
    return f"allocator's peaks: {peaks}" if peaks else ""
