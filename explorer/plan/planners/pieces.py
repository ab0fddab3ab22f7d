"""A measured line as a linear function of a policy: which bytes go and come, between which ticks, with which column.

    bytes held at t  =  measured at t  +  sum over pieces with first <= t < end of bytes * x[column]

A column is a candidate (1: recomputed), or one of these, which stand between 0 and 1 as the rows of `bonds` let them:

    gone(entry)     at most the sum of those that let it go before t, at most the sum of those that bring it back
                    after t, at most 1 less each that is given it and keeps it meanwhile
    kept(entry)     at least each that is given it, or keeps what its operator returned, beyond its measured end

A candidate inside a recomputed one keeps what it is given from when the outer one runs again until it does itself.
These are the rules of forecast/changes.py, written down for all policies at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes
from explorer.plan.planners.candidates import Candidates
from explorer.plan.predict.calls import SavedByCall
from explorer.plan.predict.replay import Replay

Bond = tuple[dict[int, float], float]
"""Coefficients by column, and what their sum may be at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a policy changes."""

    first: Bytes
    end: Bytes
    n_bytes: Bytes
    column: NDArray[np.intp]
    n_columns: int
    bonds: tuple[Bond, ...]

    def at(self, tick: int) -> NDArray[np.float64]:
        """Bytes that each column adds at `tick`."""
        here = (self.first <= tick) & (tick < self.end)
        bytes_ = self.n_bytes[here].astype(np.float64)
        return np.bincount(self.column[here], bytes_, self.n_columns).astype(np.float64)

    def line(self, measured: Bytes, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes at every tick under the columns' values `x`."""
        length = len(measured)
        bytes_ = self.n_bytes * x[self.column]
        ends = np.minimum(self.end, length)
        steps = np.bincount(self.first, bytes_, length + 1) - np.bincount(ends, bytes_, length + 1)
        return np.asarray(measured + np.cumsum(steps[:length]))


def pieces_of(replay: Replay, candidates: Candidates, *, stash_bytes: int) -> Pieces:
    """What recomputing the candidates changes."""
    collected = _Collected(replay, candidates)
    collected.plain(stash_bytes)
    for entry in collected.shared:
        collected.entry(entry)
    rows = np.array(collected.rows, dtype=np.int64).reshape(-1, 4)
    rows = np.concatenate((collected.simple, rows))
    rows = rows[(rows[:, 0] < rows[:, 1]) & (rows[:, 2] != 0)]
    return Pieces(
        first=rows[:, 0],
        end=rows[:, 1],
        n_bytes=rows[:, 2],
        column=rows[:, 3].astype(np.intp),
        n_columns=collected.n_columns,
        bonds=tuple(collected.bonds),
    )


@dataclass(slots=True)
class _Own:
    """One candidate's call lets an entry go at `leave` and brings it back at `back`."""

    unit: int
    leave: int
    back: int


@dataclass(slots=True)
class _Given:
    """One candidate's call is given an entry: kept until `ends`; inside `around` since that begins, until `begins`."""

    unit: int
    ends: int
    begins: int
    around: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Collected:
    replay: Replay
    candidates: Candidates
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    simple: Bytes = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    bonds: list[Bond] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    own: dict[int, list[_Own]] = field(default_factory=lambda: defaultdict(list))
    given: dict[int, list[_Given]] = field(default_factory=lambda: defaultdict(list))
    n_columns: int = 0
    known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def plain(self, stash_bytes: int) -> None:
        """What one candidate alone decides about, in one go; everything else is noted as shared."""
        units = self.candidates.units
        self.n_columns = len(units)
        size, born = self.replay.size, self.replay.born
        parts, uses = [], np.zeros(len(size), dtype=np.int64)
        for i, one in enumerate(units):
            for call in one.calls:
                n = len(call.entries)
                parts.append(np.column_stack((call.entries, call.leaves, np.full(n, call.begins), np.full(n, i))))
                np.add.at(uses, call.entries, 1)
                uses[list(call.inputs)] += 2
                self.rows.append((call.first, call.ends, stash_bytes, i))
                for entry in set(call.inputs):
                    holders = ((j, self._call(j, call)) for j in self.candidates.around[i])
                    around = tuple((j, holder.begins) for j, holder in holders if holder is not None)
                    self.given[entry].append(_Given(i, call.ends, call.begins, around))
                for entry, _, until in call.held:
                    uses[entry] += 2
                    self.given[entry].append(_Given(i, until, until, ()))
        every = np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)
        alone = uses[every[:, 0]] == 1
        entry, leave, back, unit = every[alone].T
        self.simple = np.column_stack((np.maximum(leave, born[entry]), back, -size[entry], unit))
        for entry_, leave_, back_, unit_ in every[~alone].tolist():
            self.own[entry_].append(_Own(unit_, leave_, back_))
        self.shared = sorted({*self.own, *self.given})

    def _call(self, unit: int, inner: SavedByCall) -> SavedByCall | None:
        calls = self.candidates.units[unit].calls
        return next((call for call in calls if call.first <= inner.first and inner.end <= call.end), None)

    def entry(self, entry: int) -> None:
        """The stretches of one entry between which anything changes."""
        own, given = self.own.get(entry, []), self.given.get(entry, [])
        born, died, size = (int(of[entry]) for of in (self.replay.born, self.replay.died, self.replay.size))
        borders = {born, died}
        for one in own:
            borders |= {one.leave, one.back}
        for call in given:
            borders |= {call.ends, call.begins, *(begins for _, begins in call.around)}
        ticks = sorted(tick for tick in borders if tick >= born)
        for first, end in zip(ticks, ticks[1:]):
            column = self._gone(first, own, given) if first < died else self._kept(first, given)
            if column is not None:
                self.rows.append((first, end, -size if first < died else size, column))

    def _gone(self, tick: int, own: list[_Own], given: list[_Given]) -> int | None:
        lets_go = frozenset(one.unit for one in own if one.leave <= tick)
        brings = frozenset(one.unit for one in own if one.back > tick)
        if not lets_go or not brings:
            return None
        outer, inner = _keepers(tick, given)
        outer = frozenset((unit, around) for unit, around in outer if not lets_go <= around)
        if lets_go == brings and len(brings) == 1 and not outer and not inner:
            return next(iter(brings))
        column, new = self._column(("gone", lets_go, brings, outer, inner))
        if new:
            self._bond({column: 1, **dict.fromkeys(lets_go, -1)}, 0)
            if not lets_go <= brings:
                self._bond({column: 1, **dict.fromkeys(brings, -1)}, 0)
            for unit, around in outer:
                self._bond({column: 1, **dict.fromkeys(around, -1), unit: 1}, 1)
            for unit, holder in inner:
                self._bond({column: 1, unit: 1, holder: 1}, 2)
        return column

    def _kept(self, tick: int, given: list[_Given]) -> int | None:
        outer, inner = _keepers(tick, given)
        if not outer and not inner:
            return None
        if len(outer) == 1 and not inner and not next(iter(outer))[1]:
            return next(iter(outer))[0]
        column, new = self._column(("kept", outer, inner))
        if new:
            for unit, around in outer:
                self._bond({column: -1, **dict.fromkeys(around, -1), unit: 1}, 0)
            for unit, holder in inner:
                self._bond({column: -1, unit: 1, holder: 1}, 1)
        return column

    def _column(self, meaning: tuple[object, ...]) -> tuple[int, bool]:
        """The column of that meaning, and whether it is new."""
        new = meaning not in self.known
        if new:
            self.known[meaning] = self.n_columns
            self.n_columns += 1
        return self.known[meaning], new

    def _bond(self, coefficients: dict[int, float], most: float) -> None:
        self.bonds.append((coefficients, most))


Keepers = tuple[frozenset[tuple[int, frozenset[int]]], frozenset[tuple[int, int]]]


def _keepers(tick: int, given: list[_Given]) -> Keepers:
    """Who keeps an entry at `tick`: unless one of those around it is recomputed, and only if one is."""
    outer = frozenset((one.unit, frozenset(j for j, _ in one.around)) for one in given if tick < one.ends)
    inner = frozenset((one.unit, j) for one in given for j, begins in one.around if begins <= tick < one.begins)
    return outer, inner
