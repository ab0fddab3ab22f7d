"""A recorded step at a glance, for a notebook's cell: one curve, its phases, a few lines. No script, no fonts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from explorer.record.measurement import Measurement
from explorer.view.drawing.colours import PHASE_COLOURS
from explorer.view.drawing.thin import minmax

WIDTH, HEIGHT, BAND = 640, 120, 10
N_POINTS = 400


def sketch(run: Measurement, lines: Sequence[str]) -> str:
    """HTML: `lines`, and the held bytes over the events of the step with its phases below."""
    words = "".join(f"<div>{'<b>' * (not i)}{escape(line)}{'</b>' * (not i)}</div>" for i, line in enumerate(lines))
    return f'<div style="font-family:sans-serif;font-size:13px">{words}{_curve(run)}{_legend(run)}</div>'


def _curve(run: Measurement) -> str:
    log = run.allocations
    if log is None:
        return ""
    held = np.asarray(log.held_bytes)
    most, end = max(int(held.max()), 1), max(log.n_ticks, 1)
    shown = minmax(held, N_POINTS)
    points = " ".join(f"{tick / end * WIDTH:.1f},{HEIGHT * (1 - held[tick] / most):.1f}" for tick in shown.tolist())
    bands = "".join(
        f'<rect x="{span.first_tick / end * WIDTH:.1f}" y="{HEIGHT}" height="{BAND}" '
        f'width="{(min(span.end_tick, end) - span.first_tick) / end * WIDTH:.1f}" fill="{PHASE_COLOURS[span.phase]}"/>'
        for span in run.phases
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.2"/>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + BAND}" width="{WIDTH}" height="{HEIGHT + BAND}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Held bytes">{line}{bands}</svg>'


def _legend(run: Measurement) -> str:
    seen = dict.fromkeys(span.phase for span in run.phases)
    return " ".join(f'<span style="color:{PHASE_COLOURS[phase]}">■</span> {phase}' for phase in seen)
