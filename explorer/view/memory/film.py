"""A step as a film: forward fills the blocks of the graph, backward drains them, a recompute fills a block again.

A frame is a stretch of events in one phase that one block causes. components/film.js plays the frames: it moves a line
over the chart, and the graph shows what each block holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from explorer.plan.memory.ledger import Bytes, array_of, events, held, ints
from explorer.record.allocations import FIXED_ROLES, PHASES, ROLES, Allocations, Phase
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Positions
from explorer.view.drawing.colours import PHASE_COLOURS
from explorer.view.drawing.rows import Rows, block_names, rows_of
from explorer.view.drawing.units import mib

MOST_BLOCKS = 200
"""Consecutive blocks of a longer model share a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmFrame:
    """The end of a stretch of events."""

    x: float
    """Place on the chart's axis."""
    phase: str
    row: int | None
    """Row of the block that causes the events; None: no block."""
    held: str
    """All bytes held, in words."""
    changes: list[tuple[int, int]]
    """Row and bytes of each row that holds something else than a frame before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """All frames of a step."""

    rows: list[tuple[str, tuple[str, ...]]]
    """Label of each row, and its blocks."""
    most: list[int]
    """The most bytes that each row holds in any frame."""
    frames: list[FilmFrame]
    colours: dict[Phase, str]
    """Colour of each phase."""


def film(run: Measurement, x: Positions) -> Film | None:
    """The film of `run`, whose tick t stands at x[t]; None without a timeline or without blocks.

    A block's bytes are those that a policy can free: what it saved, what it makes, what its recompute brought back.
    """
    log, names = run.allocations, block_names(run)
    if log is None or not names:
        return None
    rows = rows_of(names, MOST_BLOCKS)
    row_of = _row_of(log, rows)
    phase, cause = _causes(run, log, row_of)
    turns = np.flatnonzero(np.diff(phase) | np.diff(cause))
    ends = np.append(turns, log.n_ticks)
    total, by_row = held(log), _held_by_row(log, row_of, len(rows.rows))[:, ends]
    before = np.zeros(len(rows.rows), dtype=np.int64)
    frames: list[FilmFrame] = []
    for i, tick in enumerate(ends.tolist()):
        now = by_row[:, i]
        changed = np.flatnonzero(now != before).tolist()
        before = now
        frames.append(
            FilmFrame(
                x=round(float(x[tick]), 3),
                phase=PHASES[phase[tick]] if phase[tick] >= 0 else "before",
                row=int(cause[tick]) if cause[tick] >= 0 else None,
                held=mib(int(total[tick])),
                changes=[(row, int(now[row])) for row in changed],
            )
        )
    return Film(
        rows=[(row.label, row.fqns) for row in rows.rows],
        most=by_row.max(axis=1).tolist(),
        frames=frames,
        colours=PHASE_COLOURS,
    )


def _causes(run: Measurement, log: Allocations, row_of: Bytes) -> tuple[Bytes, Bytes]:
    """Phase and row of the events of each tick; -1: before the step, no row.

    An allocation belongs to its block; a free, and what no block owns, to the block before it in the phase.
    """
    happened = events(log)
    cause = np.where(happened.sign > 0, row_of[happened.entry], -1)
    phase = np.full(log.n_ticks + 1, -1)
    for span in run.phases:
        phase[span.first_tick : span.end_tick] = PHASES.index(span.phase)
    borders = [0, *(np.flatnonzero(np.diff(phase)) + 1).tolist(), len(phase)]
    for start, end in pairwise(borders):
        places = np.where(cause[start:end] >= 0, np.arange(end - start), 0)
        cause[start:end] = cause[start:end][np.maximum.accumulate(places)]
    return phase, cause


def _row_of(log: Allocations, rows: Rows) -> Bytes:
    """Row of each entry."""
    by_block = ints([rows.index(fqn) for fqn in log.blocks] or [-1])
    return by_block[array_of(log.block)] if len(log.block) else np.full(1, -1)


def _held_by_row(log: Allocations, row_of: Bytes, n_rows: int) -> Bytes:
    """Bytes that each row holds at each tick, without those that no policy frees; shape [rows, n_ticks + 1]."""
    freeable = ~np.isin(array_of(log.role), [ROLES.index(name) for name in FIXED_ROLES])
    return np.stack([held(log, freeable & (row_of == i)) for i in range(n_rows)])
