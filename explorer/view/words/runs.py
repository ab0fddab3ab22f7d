"""The headline figures of a stored run in words: what `--json` calls step_peak_bytes, a person reads as Step peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.record.measurement import Measurement
from explorer.view.drawing.units import NOT_MEASURED, flops, mib, milliseconds, percent
from explorer.view.words.cut_short import peak_and_end


def figures_of(run: Measurement) -> dict[str, str]:
    """Each figure of a run under its name on the page, with its unit."""
    return {
        "Step peak": peak_and_end(run),
        "Phase of the peak": str(run.peak_phase or NOT_MEASURED),
        "Saved after forward": mib(run.saved_after_forward_bytes),
        "Forward": flops(run.forward_flops),
        "Recompute": flops(run.recompute_flops),
        "Backward": flops(run.backward_flops),
        "Step time": milliseconds(run.times.step if run.times and run.complete else None),
    }


def stored_flops(headlines: Mapping[str, Any]) -> str:
    """`+33 %` against the baseline, or the FLOPs of a run by itself; the empty string: neither is known."""
    if (ratio := headlines.get("flop_ratio")) is not None:
        return percent(ratio - 1, signed=True)
    parts = [headlines.get(f"{phase}_flops") for phase in ("forward", "recompute", "backward")]
    known = [part for part in parts if part is not None]
    return flops(sum(known)) if known else ""


def stored_time(headlines: Mapping[str, Any]) -> str:
    """`×1.25 ± 0.02` against the baseline, or the time of a step; the empty string: neither is known."""
    if (ratio := headlines.get("time_ratio")) is not None:
        return f"×{ratio:.2f} ± {headlines.get('time_ratio_spread') or 0:.2f}"
    if (ms := headlines.get("step_ms")) is not None:
        return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2f} ms"
    return ""
