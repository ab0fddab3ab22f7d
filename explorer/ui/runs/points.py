"""The runs of one model as points of peak and time; a click selects the run in the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from explorer.jobs.store import StoredRun
from explorer.record.policy import KEEP_ALL, Policy
from explorer.ui.runs.listed import own
from explorer.view.compare.run_plane import RunPoint
from explorer.view.text.plan import in_words
from explorer.view.text.runs import conditions

Placed = list[tuple[StoredRun, RunPoint]]


def points_of(runs: Sequence[StoredRun]) -> Placed:
    """A point for each run with a peak and a time, and for each baseline once per kind of conditions.

    The machine is named if the runs are from several machines.
    """
    several = len({run.machine for run in runs}) > 1
    placed: Placed = []
    kept: dict[str, tuple[StoredRun, RunPoint]] = {}
    for run in runs:
        if run.spec is None:
            continue
        where = f", {run.machine}" if several else ""
        group = f"{conditions(run.spec)}{where}"
        verdict = str(run.headlines.get("verdict", ""))
        if (point := _point(run, own(run), (group, run.spec.policy, verdict))) is not None:
            placed.append((run, point))
        base = run.headlines.get("baseline")
        if base is None or group in kept or run.headlines.get("n_baseline_recompute"):
            continue
        if (point := _point(run, base, (group, KEEP_ALL, ""))) is not None:
            kept[group] = run, point
    return [*placed, *kept.values()]


def _point(run: StoredRun, figures: dict[str, Any], what: tuple[str, Policy, str]) -> RunPoint | None:
    peak, ms = figures.get("step_peak_bytes"), figures.get("step_ms")
    if peak is None or ms is None:
        return None
    group, policy, verdict = what
    return RunPoint(
        name=run.name if policy.units or figures is run.headlines else "everything kept",
        policy=in_words(policy),
        conditions=group,
        peak_bytes=peak,
        step_ms=ms,
        spread_ms=figures.get("step_spread_ms"),
        verdict=verdict,
        keeps_all=not policy.units,
    )
