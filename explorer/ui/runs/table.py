"""The list of runs: the page's state, the table with its selected rows, and the runs as points of peak and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import streamlit as st

from explorer.jobs.store import StoredRun
from explorer.record.policy import KEEP_ALL, Policy
from explorer.ui.session.values import session_value
from explorer.view.compare.front import RunPoint
from explorer.view.drawing.units import MIB, NOT_MEASURED, count, from_to, median_ms, mib, time_ratio
from explorer.view.text.plan import in_words
from explorer.view.text.runs import conditions, stored_flops

MOST_ROWS, HEIGHT = 12, 380
"""More rows than these scroll, within so many pixels."""
PIPELINE, RANKS, HISTORY = "pipeline run", "recorded ranks", "memory history"
OF_A_STEP = ("measurement", "comparison")
"""Kinds with the figures of a step."""
ALL = "all models"


@dataclass(slots=True, kw_only=True)
class RunsState:
    """A visitor's state of the Runs page, changed in place."""

    order: int = 0
    """Number of changes of the rows. A new number makes a new table, in which only `select` is selected."""
    select: str | None = None
    """Id of the run that the next table begins with."""
    outcome: str = ""
    """Message on the last action, until it is shown."""
    error: str = ""
    """Reason why the last action failed, until it is shown."""
    files_taken: set[str] = field(default_factory=set)
    """Ids of uploaded files that are in the list already."""


def current() -> RunsState:
    """This visitor's state."""
    return session_value("runs", RunsState, RunsState)


def reorder(select: str | None = None) -> None:
    """Makes a new table after a change of rows: no selected row may become another run. `select`: run to select."""
    state = current()
    state.order, state.select = state.order + 1, select


def own_figures(run: StoredRun) -> dict[str, Any]:
    """Headline figures of the run itself: of the candidate in a comparison."""
    figures: dict[str, object] = run.headlines.get("candidate") or run.headlines
    return figures


def chosen_runs(runs: tuple[StoredRun, ...]) -> tuple[StoredRun, ...]:
    """The runs of the model that is chosen here, the newest first. A click on a column's name sorts the table."""
    models = [ALL, *sorted({run.model for run in runs if run.model})]
    model = st.selectbox("Model", models, key="runs_model", on_change=reorder)
    return tuple(run for run in runs if model in (ALL, run.model))


def table(runs: tuple[StoredRun, ...]) -> list[StoredRun]:
    """Draws the list; returns the selected runs."""
    state = current()
    rows = [row for row, run in enumerate(runs) if run.run_id == state.select]
    event = st.dataframe(
        [_row(run) for run in runs],
        key=f"runs_{state.order}",
        hide_index=True,
        width="stretch",
        placeholder="",
        height="content" if len(runs) < MOST_ROWS else HEIGHT,
        on_select="rerun",
        selection_mode="multi-row",
        selection_default={"selection": {"rows": rows, "columns": [], "cells": []}} if rows else None,
        alt="Every finished run",
        column_config={
            "finished": st.column_config.DatetimeColumn("finished", format="YYYY-MM-DD HH:mm"),
            "peak (MiB)": st.column_config.NumberColumn(format="%.1f", help="Step peak, of the candidate; measured"),
            "step (ms)": st.column_config.NumberColumn(format="%.1f", help="Step time, of the candidate; measured"),
        },
    )
    selected: list[int] = event["selection"]["rows"]
    return [runs[row] for row in selected if row < len(runs)]


def _row(run: StoredRun) -> dict[str, object]:
    figures = own_figures(run) if run.kind in OF_A_STEP else {}
    peak = figures.get("step_peak_bytes")
    return {
        "name": run.name,
        "kind": run.kind,
        "model": run.model,
        "peak (MiB)": None if peak is None else peak / MIB,
        "step (ms)": figures.get("step_ms"),
        "step peak": _peak(run),
        "FLOPs": stored_flops(run.headlines),
        "step time": stored_time(run.headlines),
        "gradients": _gradients(run),
        "note": run.note,
        "policy": "" if run.spec is None else in_words(run.spec.policy),
        "finished": datetime.fromtimestamp(run.created),
    }


def _peak(run: StoredRun) -> str:
    """The step's peak, a pipeline run's on its highest rank; empty for kinds of run that have none."""
    headlines = run.headlines
    if ranks := headlines.get("rank_peak_bytes"):
        return f"{mib(max(ranks))} on rank {ranks.index(max(ranks))}"
    if "fullest_rank" in headlines:
        return f"{stored_peak(headlines)} on rank {headlines['fullest_rank']}"
    if run.kind == HISTORY:
        return mib(headlines.get("held_peak_bytes"))
    if run.kind not in OF_A_STEP:
        return ""
    base, candidate = headlines.get("baseline"), headlines.get("candidate") or headlines
    if not base:
        return stored_peak(candidate)
    if not headlines.get("comparable", True):
        return f"{stored_peak(base)}; {stored_peak(candidate)}"
    n_blocks = headlines.get("n_baseline_recompute")
    before = f" ({count(n_blocks, 'block')} recomputed in the baseline)" if n_blocks else ""
    return from_to(base.get("step_peak_bytes"), candidate.get("step_peak_bytes"), " → ") + before


def _gradients(run: StoredRun) -> str:
    headlines = run.headlines
    if "n_splitting_equal" not in headlines:
        return str(headlines.get("verdict", ""))
    return f"{headlines['n_splitting_equal']} of {headlines['n_gradients']} equal" if headlines["n_gradients"] else ""


def points_of(runs: Sequence[StoredRun]) -> list[tuple[StoredRun, RunPoint]]:
    """A point for each run with a peak and a time, and for each baseline once per kind of conditions.

    The machine is named if the runs are from several machines.
    """
    several = len({run.machine for run in runs}) > 1
    points: list[tuple[StoredRun, RunPoint]] = []
    baselines: dict[str, tuple[StoredRun, RunPoint]] = {}
    for run in runs:
        if run.spec is None:
            continue
        where = f", {run.machine}" if several else ""
        group = f"{conditions(run.spec)}{where}"
        verdict = str(run.headlines.get("verdict", ""))
        if (point := _point(run, own_figures(run), (group, run.spec.policy, verdict))) is not None:
            points.append((run, point))
        base = run.headlines.get("baseline")
        if base is None or group in baselines or run.headlines.get("n_baseline_recompute"):
            continue
        if (point := _point(run, base, (group, KEEP_ALL, ""))) is not None:
            baselines[group] = run, point
    return [*points, *baselines.values()]


def _point(run: StoredRun, figures: dict[str, Any], labels: tuple[str, Policy, str]) -> RunPoint | None:
    peak, ms = figures.get("step_peak_bytes"), figures.get("step_ms")
    if peak is None or ms is None:
        return None
    group, policy, verdict = labels
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


def stored_peak(headlines: dict[str, object]) -> str:
    """The peak of a measurement from its stored headline figures."""
    peak, least = headlines.get("step_peak_bytes"), headlines.get("held_peak_bytes")
    if isinstance(peak, int):
        return mib(peak)
    return f"at least {mib(least)}, then failed" if isinstance(least, int) else NOT_MEASURED


def stored_time(headlines: Mapping[str, Any]) -> str:
    """`×1.25 ± 0.02` against the baseline, or the time of a step; the empty string: neither is known."""
    if (ratio := headlines.get("time_ratio")) is not None:
        return time_ratio(ratio, headlines.get("time_ratio_spread"))
    if (ms := headlines.get("step_ms")) is not None:
        return median_ms(ms)
    return ""
