"""Bytes at every tick, computed from the entries that were alive: the one series that charts and headlines share.

All arrays have `n_ticks + 1` int64 values; tick 0 is the state before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.names import is_within
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import Column

Bytes = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What happened at each tick."""

    entry: Bytes
    """The entry that was born or died there; -1: none."""
    sign: NDArray[np.int8]
    """1 allocated, -1 freed, 0 nothing."""


def array_of(values: Column) -> Bytes:
    """A column as a numpy array, without a copy."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.empty(0, dtype=np.int64)


def held(log: Allocations, only: Mask | None = None) -> Bytes:
    """Bytes alive at each tick; `only` picks the entries that count."""
    size, born, died = array_of(log.n_bytes), array_of(log.born), array_of(log.died)
    if only is not None:
        size, born, died = size[only], born[only], died[only]
    length = log.n_ticks + 2
    # bincount adds in float64, exact below 2**53 bytes (8 PiB).
    changes = np.bincount(born, size, length) - np.bincount(died, size, length)
    return np.cumsum(changes[:-1]).astype(np.int64)


def held_by_role(log: Allocations, only: Mask | None = None) -> Bytes:
    """Bytes alive at each tick, one row a role, in the order of ROLES; the rows add up to `held`."""
    role = array_of(log.role)
    rows = [held(log, role == i if only is None else (role == i) & only) for i in range(len(ROLES))]
    return np.stack(rows)


def belongs(log: Allocations, block: str) -> Mask:
    """Which entries belong to `block` or to something below it; the empty string is the whole model."""
    inside = np.fromiter((is_within(fqn, block) for fqn in log.blocks), dtype=np.bool_, count=len(log.blocks))
    return inside[array_of(log.block)] if len(log.block) else np.zeros(0, dtype=np.bool_)


def alive(log: Allocations, tick: int) -> NDArray[np.intp]:
    """Entries alive at `tick`."""
    return np.flatnonzero((array_of(log.born) <= tick) & (tick < array_of(log.died)))


def events(log: Allocations) -> Events:
    """The entry and the direction of each tick 0..n_ticks."""
    entry = np.full(log.n_ticks + 2, -1, dtype=np.int64)
    sign = np.zeros(log.n_ticks + 2, dtype=np.int8)
    index = np.arange(len(log.n_bytes))
    for ticks, direction in ((array_of(log.died), -1), (array_of(log.born), 1)):
        entry[ticks] = index
        sign[ticks] = direction
    # What was there before the step, and what outlives it, is not an event.
    entry[[0, -1]], sign[[0, -1]] = -1, 0
    return Events(entry=entry[:-1], sign=sign[:-1])


def peak_tick(log: Allocations) -> int:
    """First tick at which most is held."""
    return int(held(log).argmax())
