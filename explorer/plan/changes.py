"""A measured timeline with some units recomputed: what leaves it, what stays longer, what comes twice.

    held  ________                      ________
          forward |____________________|        kept -> recomputed: the shaded bytes are gone,
          of b    fe ////////////////// rb      the peak may now be at rb (the recompute itself)

Beside what stays.py says of each call alone: an input that a checkpoint keeps stays although another unit would free
it (a skip that one block makes and another is given), and each call keeps the state of torch's generator on the CPU.
Source: https://docs.pytorch.org/docs/stable/checkpoint.html; tests/engine/test_forecast_comes_true.py holds it to runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.replay import Replay
from explorer.plan.series import Bytes, Mask
from explorer.plan.stays import Stay
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy

RNG_STATE_BYTES = 5056
"""Of torch's CPU generator (torch.get_rng_state), which every checkpoint call keeps; a GPU's state lies on the CPU."""
Changes = NDArray[np.int64]
"""Rows of (first tick, end tick, bytes more than measured between them)."""


def stash_bytes(measurement: Measurement, policy: Policy) -> int:
    """Bytes that every checkpoint call keeps on the measured device for its generator."""
    return RNG_STATE_BYTES if policy.preserve_rng_state and measurement.environment.device == "cpu" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What recomputing changes: the line, and what is saved at the end of forward."""

    changes: Changes
    saved_bytes: int
    """Saved at the end of forward, more than measured: negative where something leaves."""
    away: Mask
    """Of each entry, whether it has left by then."""


def changes_of(replay: Replay, stays: Sequence[Stay], border: int | None, *, stash_bytes: int) -> Played:
    """All of `stays` recomputed. Tick `border` is the end of forward; None: it was not reached, nothing is away."""
    until = np.zeros(len(replay.size), dtype=np.int64)
    for stay in stays:
        inputs = list(stay.inputs)
        until[inputs] = np.maximum(until[inputs], stay.begins)
    entries = joined([stay.entries for stay in stays])
    begins = np.repeat([stay.begins for stay in stays], [len(stay.entries) for stay in stays]).astype(np.int64)
    leaves, given = joined([stay.leaves for stay in stays]), np.minimum(until[entries], begins)
    gone = np.column_stack((np.maximum(leaves, given), begins, -replay.size[entries]))
    longer = np.flatnonzero(replay.died < until)
    kept = np.column_stack((replay.died[longer], until[longer], replay.size[longer]))
    stashed = np.array([(stay.first, stay.begins, stash_bytes) for stay in stays], dtype=np.int64).reshape(-1, 3)
    saved, away = 0, np.zeros(len(replay.size), dtype=bool)
    if border is not None:
        away[entries[(leaves <= border + 1) & (given <= border) & (border < begins)]] = True
        longer_saved = kept[(kept[:, 0] <= border) & (border < kept[:, 1]), 2]
        saved = int(longer_saved.sum()) - int(replay.size[away].sum())
    return Played(changes=np.concatenate((gone, kept, stashed)), saved_bytes=saved, away=away)


def offsets_of(changes: Changes, length: int) -> tuple[NDArray[np.intp], Bytes]:
    """Borders of the stretches of a line of `length` with one offset, and those offsets."""
    first, end, size = changes[changes[:, 0] < changes[:, 1]].T
    bounds = np.unique(np.concatenate(([0], first, end)))
    bounds = bounds[bounds < length]
    steps = np.zeros(len(bounds), dtype=np.int64)
    for ticks, sizes in ((first, size), (end, -size)):
        inside = ticks < length
        np.add.at(steps, np.searchsorted(bounds, ticks[inside]), sizes[inside])
    return bounds.astype(np.intp), np.cumsum(steps)


def joined(parts: Sequence[Bytes]) -> Bytes:
    """One after another; of no parts an empty column."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def peak_with(replay: Replay, changes: Changes, stays: Sequence[Stay]) -> int:
    """The peak once `changes` are made, and each of `stays` comes back by running forward again."""
    bounds, offsets = offsets_of(changes, len(replay.line))
    peak = int((np.maximum.reduceat(replay.line, bounds) + offsets).max())
    before = [max(stay.begins - 1, 0) for stay in stays]
    places = np.searchsorted(bounds, before, side="right") - 1
    for stay, tick, place in zip(stays, before, places):
        late = int(replay.size[stay.entries[stay.leaves >= stay.begins]].sum())  # gone and back at the same moment
        peak = max(peak, int(replay.line[tick] + offsets[place]) - late + stay.again_bytes)
    return peak
