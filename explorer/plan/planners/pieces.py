"""The timeline as a linear function of a policy. A piece adds bytes between two ticks, multiplied by a column.

    bytes held at t  =  measured at t  +  sum over pieces with first <= t < end of bytes * x[column]

A column is a candidate (1: recomputed) or one of two auxiliary columns, between 0 and 1 and bounded by `bonds`:

    gone(entry)     at most the sum of the candidates that free the entry before t, at most the sum of the candidates
                    that restore it after t, at most 1 minus each candidate that keeps it as an input meanwhile
    kept(entry)     at least each candidate that keeps the entry beyond its measured end, as an input or as a result

A candidate inside a recomputed unit keeps its inputs from the rerun of the outer unit until its own rerun.
The rules are those of predict/changes.py, written for all policies at once.
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
"""Coefficients by column, and the upper bound of their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Changes of the timeline by a policy, one element per piece, and the bonds of the auxiliary columns."""

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
    """The pieces and bonds of recomputing the candidates; `stash_bytes`: generator state that each call keeps."""
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
    """A call of candidate `unit` frees an entry at tick `leave` and restores it at tick `back`."""

    unit: int
    leave: int
    back: int


@dataclass(slots=True)
class _Given:
    """A call of candidate `unit` has an entry as input and keeps it until tick `ends`.

    Inside a recomputed unit of `around` the call keeps the entry from the tick given there until tick `begins`.
    """

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
        """Collects the entries that one candidate alone changes. All other entries go to `shared`."""
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
        """Adds the pieces of a shared entry, one for each stretch between two changes."""
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
        """The number of the auxiliary column with this meaning, and whether the column is new."""
        new = meaning not in self.known
        if new:
            self.known[meaning] = self.n_columns
            self.n_columns += 1
        return self.known[meaning], new

    def _bond(self, coefficients: dict[int, float], most: float) -> None:
        self.bonds.append((coefficients, most))


Keepers = tuple[frozenset[tuple[int, frozenset[int]]], frozenset[tuple[int, int]]]


def _keepers(tick: int, given: list[_Given]) -> Keepers:
    """Candidates that keep an entry as input at `tick`: outer and inner.

    An outer (unit, units around it) keeps the entry if no unit around it is recomputed.
    An inner (unit, holder) keeps the entry only if its holder is recomputed.
    """
    outer = frozenset((one.unit, frozenset(j for j, _ in one.around)) for one in given if tick < one.ends)
    inner = frozenset((one.unit, j) for one in given for j, begins in one.around if begins <= tick < one.begins)
    return outer, inner
