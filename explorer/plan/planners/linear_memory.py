"""The memory of a step as a linear function of the units that are recomputed.

The numbers of rules are those of plan/predict/__init__.py, which this file applies to all policies at once:

    bytes held at t  =  measured at t  +  sum over changes with first <= t < end of bytes * factor

A factor is 1 if a unit is recomputed and 0 if it is kept, or one of two auxiliary factors between 0 and 1:

    absence(entry)   at most the sum of the units that free the entry before t (rule 1).
                     At most the sum of the units that restore it after t, unless it is let go before t (rule 1).
                     At most 1 minus each unit that keeps it as an input meanwhile (rule 2).
    presence(entry)  At least each unit that keeps the entry beyond its measured end (rules 2 and 6).

A rerun has one row for each of its moments (rule 4):

    held before its backward begins  +  alive at this moment of the rerun  +  generator state of the unit
        -  bytes freed by units inside  +  inputs that units inside keep, and their generator state    <= budget

For a unit that is not recomputed the row states only the budget before its backward. A rerun that ends in a unit
inside stops early (rule 7): moments after the stop have no row. Copies of statistics (rule 5) have no row in a rerun.
Rows never hold more than the simulation, so their bound is valid, and a choice that they let through is simulated. So
offload of one unit counts as freed what it frees if every other unit is offloaded too.

predict/changes.py simulates one policy, tensor by tensor. This file is what an integer program of all policies needs.
The tests of the planners compare both on every policy of some units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes, ints
from explorer.plan.planners.candidates import Candidates
from explorer.plan.predict.calls import SavedByCall, bytes_at
from explorer.plan.predict.replay import NEVER, Replay
from explorer.record.base import Record

Row = tuple[dict[int, float], float]
"""Coefficients by factor or by variable, and the upper bound of their sum."""


class LinearTimeline(Record):
    """Changes of the timeline, one element per change, and the bounds of the auxiliary factors."""

    first: Bytes
    end: Bytes
    n_bytes: Bytes
    factor: NDArray[np.intp]
    n_factors: int
    bounds: tuple[Row, ...]

    def at(self, tick: int) -> NDArray[np.float64]:
        """Bytes that each factor adds at `tick`."""
        here = (self.first <= tick) & (tick < self.end)
        bytes_ = self.n_bytes[here].astype(np.float64)
        return np.bincount(self.factor[here], bytes_, self.n_factors).astype(np.float64)

    def line(self, measured: Bytes, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes at every tick under the values `factors`."""
        length = len(measured)
        bytes_ = self.n_bytes * factors[self.factor]
        ends = np.minimum(self.end, length)
        steps = np.bincount(self.first, bytes_, length + 1) - np.bincount(ends, bytes_, length + 1)
        return np.asarray(measured + np.cumsum(steps[:length]))


def linear_timeline(replay: Replay, candidates: Candidates, *, stash_bytes: int) -> LinearTimeline:
    """The timeline as a linear function; `stash_bytes`: generator state that each call keeps (rule 3)."""
    changes = _Changes(replay, candidates)
    changes.of_single_units(stash_bytes)
    for entry in sorted({*changes.gaps, *changes.retained}):
        changes.of_shared_entry(entry)
    rows = ints(changes.rows).reshape(-1, 4)
    rows = np.concatenate((changes.simple, rows))
    rows = rows[(rows[:, 0] < rows[:, 1]) & (rows[:, 2] != 0)]
    return LinearTimeline(
        first=rows[:, 0],
        end=rows[:, 1],
        n_bytes=rows[:, 2],
        factor=rows[:, 3].astype(np.intp),
        n_factors=changes.n_factors,
        bounds=tuple(changes.bounds),
    )


@dataclass(slots=True)
class _Gap:
    """A call of `unit` frees an entry at tick `leave` and restores it at tick `back` (rule 1)."""

    unit: int
    leave: int
    back: int


@dataclass(slots=True)
class _Retention:
    """A call of `unit` keeps an entry until tick `until` (rule 2, or rule 6).

    Inside a recomputed unit of `around` it keeps the entry from the tick beside that unit until `backward_begins`.
    """

    unit: int
    until: int
    backward_begins: int
    around: tuple[tuple[int, int], ...]


Keepers = tuple[frozenset[tuple[int, frozenset[int]]], frozenset[tuple[int, int]]]


@dataclass(slots=True)
class _Changes:
    """The changes of the timeline while they are collected."""

    replay: Replay
    candidates: Candidates
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """First tick, end tick, bytes and factor of each change."""
    simple: Bytes = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    """Rows of entries that one unit alone changes."""
    bounds: list[Row] = field(default_factory=list)
    gaps: dict[int, list[_Gap]] = field(default_factory=lambda: defaultdict(list))
    retained: dict[int, list[_Retention]] = field(default_factory=lambda: defaultdict(list))
    n_factors: int = 0
    auxiliary: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The number of each auxiliary factor, by its meaning."""

    def of_single_units(self, stash_bytes: int) -> None:
        """Collects entries that one unit alone changes. The others go to `gaps` and `retained`."""
        self.n_factors = len(self.candidates.units)
        size, born = self.replay.size, self.replay.born
        parts, n_uses = [], np.zeros(len(size), dtype=np.int64)
        for unit, candidate in enumerate(self.candidates.units):
            for call in candidate.calls:
                n = len(call.entries)
                parts.append(
                    np.column_stack((call.entries, call.freed_at, np.full(n, call.backward_begins), np.full(n, unit)))
                )
                np.add.at(n_uses, call.entries, 1)
                n_uses[list(call.inputs)] += 2
                self.rows.append((call.first, call.backward_ends, stash_bytes, unit))
                self.rows += [(*copy, unit) for copy in call.copies]
                around = tuple((i, outer.backward_begins) for i, outer in self.candidates.calls_around(unit, call))
                for entry in set(call.inputs):
                    self.retained[entry].append(_Retention(unit, call.backward_ends, call.backward_begins, around))
                for entry, _, until in call.kept_results:
                    n_uses[entry] += 2
                    self.retained[entry].append(_Retention(unit, until, until, ()))
        every = np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)
        alone = n_uses[every[:, 0]] == 1
        entry, leave, back, of_unit = every[alone].T
        until, died = self.replay.restored_until[entry], self.replay.died[entry]
        absent = np.column_stack((np.maximum(leave, born[entry]), back, -size[entry], of_unit))
        let_go = np.column_stack((np.maximum(until, back), died, -size[entry], of_unit))
        self.simple = np.concatenate((absent, let_go))
        for shared, leave_, back_, unit in every[~alone].tolist():
            self.gaps[shared].append(_Gap(unit, leave_, back_))

    def of_shared_entry(self, entry: int) -> None:
        """Adds the changes of a shared entry, one for each stretch between two events."""
        gaps, retained = self.gaps.get(entry, []), self.retained.get(entry, [])
        born, died, size = (int(of[entry]) for of in (self.replay.born, self.replay.died, self.replay.size))
        until = int(self.replay.restored_until[entry])
        events = {born, until, died}
        for gap in gaps:
            events |= {gap.leave, gap.back}
        for retention in retained:
            events |= {retention.until, retention.backward_begins, *(begins for _, begins in retention.around)}
        ticks = sorted(tick for tick in events if tick >= born)
        for first, end in zip(ticks, ticks[1:]):
            let_go = first >= until
            factor = self._absence(first, gaps, retained, let_go) if first < died else self._presence(first, retained)
            if factor is not None:
                self.rows.append((first, end, -size if first < died else size, factor))

    def _absence(self, tick: int, gaps: list[_Gap], retained: list[_Retention], let_go: bool) -> int | None:
        """The factor of an entry's absence at `tick`; None if no unit frees it there.

        `let_go`: the entry is gone again where it was restored.
        """
        freeing = frozenset(gap.unit for gap in gaps if gap.leave <= tick)
        restoring = freeing if let_go else frozenset(gap.unit for gap in gaps if gap.back > tick)
        if not freeing or not restoring:
            return None
        outer, inner = _keepers_at(tick, retained)
        outer = frozenset((unit, around) for unit, around in outer if not freeing <= around)
        if freeing == restoring and len(restoring) == 1 and not outer and not inner:
            return next(iter(restoring))
        bounds: list[Row] = [(dict.fromkeys(freeing, -1), 0)]
        if not freeing <= restoring:
            bounds.append((dict.fromkeys(restoring, -1), 0))
        return self._factor(("absence", freeing, restoring, outer, inner), 1, [*bounds, *_keeping(outer, inner, 1)])

    def _presence(self, tick: int, retained: list[_Retention]) -> int | None:
        """The factor of an entry's presence at `tick` after its measured end; None if no unit keeps it there."""
        outer, inner = _keepers_at(tick, retained)
        if not outer and not inner:
            return None
        if len(outer) == 1 and not inner and not next(iter(outer))[1]:
            return next(iter(outer))[0]
        return self._factor(("presence", outer, inner), -1, _keeping(outer, inner, 0))

    def _factor(self, meaning: tuple[object, ...], sign: int, bounds: Sequence[Row]) -> int:
        """The number of the auxiliary factor with this meaning. `sign` is its coefficient in the `bounds`."""
        if meaning not in self.auxiliary:
            self.auxiliary[meaning] = self.n_factors
            self.bounds += [({self.n_factors: sign, **row}, most) for row, most in bounds]
            self.n_factors += 1
        return self.auxiliary[meaning]


def _keepers_at(tick: int, retained: list[_Retention]) -> Keepers:
    """Units that keep an entry at `tick`: outer and inner (rule 2).

    An outer (unit, units around it) keeps the entry if no unit around it is recomputed.
    An inner (unit, holder) keeps the entry only if its holder is recomputed.
    """
    outer: set[tuple[int, frozenset[int]]] = set()
    inner: set[tuple[int, int]] = set()
    for retention in retained:
        if tick < retention.until:
            outer.add((retention.unit, frozenset(holder for holder, _ in retention.around)))
        for holder, begins in retention.around:
            if begins <= tick < retention.backward_begins:
                inner.add((retention.unit, holder))
    return frozenset(outer), frozenset(inner)


def _keeping(outer: frozenset[tuple[int, frozenset[int]]], inner: frozenset[tuple[int, int]], most: int) -> list[Row]:
    """Bounds of a factor by the units that keep an entry: `most` is 1 for an absence, 0 for a presence."""
    bounds: list[Row] = [({**dict.fromkeys(around, -1), unit: 1}, most) for unit, around in outer]
    bounds += [({unit: 1, holder: 1}, most + 1) for unit, holder in inner]
    return bounds


class Rerun(Record):
    """One call of a unit that runs again (rule 4)."""

    unit: int
    tick: int
    """The last tick before backward of the call begins."""
    alive: Bytes
    """Bytes that the rerun adds at each of its moments, if no unit inside is recomputed."""
    inside: Mapping[int, Bytes]
    """By unit inside: bytes that it keeps minus bytes that it frees, at each moment."""
    restored: tuple[tuple[int, int, Mapping[int, int]], ...]
    """Units around whose backward begins at the same tick: number, bytes they restore, bytes by inner unit.

    The bytes of an inner unit are not restored if that unit is recomputed too.
    """


def linear_reruns(replay: Replay, candidates: Candidates, *, stash_bytes: int) -> tuple[Rerun, ...]:
    """The reruns of every call of every unit."""
    reruns = []
    again = [(i, candidate) for i, candidate in enumerate(candidates.units) if candidate.unit.action != "offload"]
    for unit, call in ((unit, call) for unit, candidate in again for call in candidate.calls):
        within = candidates.calls_inside(unit, call)
        alive, parts = ints([call.rerun_bytes]), dict[int, Bytes]()
        if within:
            alive, parts = _moments(replay, call, within, stash_bytes=stash_bytes)
        around = [
            (holder, outer) for holder, outer in candidates.calls_around(unit, call)
            if outer.backward_begins == call.backward_begins
        ]  # fmt: skip
        reruns.append(
            Rerun(
                unit=unit,
                tick=max(call.backward_begins - 1, 0),
                alive=alive + stash_bytes - call.late_bytes,
                inside=parts,
                restored=tuple(_restored(replay, candidates, (unit, call), outer) for outer in around),
            )
        )
    return tuple(reruns)


def _moments(
    replay: Replay, call: SavedByCall, within: list[tuple[int, SavedByCall]], *, stash_bytes: int
) -> tuple[Bytes, dict[int, Bytes]]:
    """Bytes alive at each allocation of the rerun, and the change of these bytes by each unit inside.

    The rerun repeats forward up to the last saved tensor.
    """
    entries = replay.between(call.first, call.rerun_ends)
    size, born, died = replay.size[entries], replay.born[entries], replay.died[entries]
    moments = np.unique(born)
    alive = bytes_at(moments, size, born, died)
    place = {entry: k for k, entry in enumerate(entries.tolist())}
    tail = int(entries[-1]) if len(entries) else None
    by_unit: dict[int, Bytes] = {}
    for unit, inner in within:
        pairs = zip(inner.entries.tolist(), inner.freed_at.tolist())
        freed_again = [(place[entry], leaves) for entry, leaves in pairs if entry in place]
        at = ints([k for k, _ in freed_again])
        first = ints([leaves for _, leaves in freed_again])
        freed = bytes_at(moments, size[at], first, np.maximum(first, died[at]))
        if tail is not None and (tail in inner.entries or tail in inner.saved_outputs):
            freed = np.where(moments > inner.first, alive, freed)
        inputs = ints([place[entry] for entry in set(inner.inputs) if entry in place])
        retained = bytes_at(moments, size[inputs], died[inputs], np.full(len(inputs), NEVER))
        retained = retained + stash_bytes * (moments > inner.first)
        by_unit[unit] = by_unit.get(unit, 0) + retained - freed
    return alive, by_unit


def _restored(
    replay: Replay, candidates: Candidates, inner: tuple[int, SavedByCall], around: tuple[int, SavedByCall]
) -> tuple[int, int, Mapping[int, int]]:
    """Bytes that the unit around restores just before `inner` runs again, as in `Rerun.restored`."""
    (unit, call), (holder, outer) = inner, around
    freed = outer.entries[(outer.freed_at < outer.backward_begins) & ~np.isin(outer.entries, call.entries)]
    others: dict[int, int] = {}
    for sibling, inside in candidates.calls_inside(holder, outer):
        if sibling != unit:
            less = int(replay.size[freed[np.isin(freed, inside.entries)]].sum())
            if less:
                others[sibling] = others.get(sibling, 0) + less
    return holder, int(replay.size[freed].sum()), others
