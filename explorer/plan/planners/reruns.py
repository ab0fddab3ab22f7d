"""Memory during a rerun of a candidate, as a linear function of the policy: one row for each moment of the rerun.

    held before its backward begins  +  alive at this moment of the rerun  +  generator state of the candidate
        -  bytes freed by units inside  +  inputs that units inside keep, and their generator state    <= budget

For a candidate that is not recomputed the row states only the budget before its backward. A rerun that ends in a unit
inside stops early: moments after the stop have no row. A unit counts as inside if it is recomputed inside this
candidate: column x[unit | candidate] of columns.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from explorer.plan.memory.ledger import Bytes
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.columns import Columns, Values
from explorer.plan.predict.calls import FOREVER, SavedByCall
from explorer.plan.predict.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """One call of a candidate that runs again."""

    unit: int
    tick: int
    """The last tick before backward of the call begins."""
    alive: Bytes
    """Bytes that the rerun adds at each of its moments, if no unit inside is recomputed."""
    inside: tuple[tuple[int, Bytes], ...]
    """Each candidate inside: bytes that it keeps minus bytes that it frees, at each moment."""
    back: tuple[tuple[int, int, dict[int, int]], ...]
    """Candidates around whose backward begins at the same tick: number, bytes they restore, bytes by inner unit.

    The bytes of an inner unit are not restored if that unit is recomputed too.
    """

    def worst(self, x: Values, columns: Columns) -> list[tuple[float, dict[int, float]]]:
        """Excess bytes and row of the moment that holds most under `x`, alone and with each candidate of `back`."""
        taken = x[columns.of_unit[self.unit]].sum()
        held = self.alive * taken
        for unit, more in self.inside:
            held = held + more * x[columns.number[unit, self.unit]]
        at = int(held.argmax())
        row = dict.fromkeys(columns.of_unit[self.unit], float(self.alive[at]))
        row |= {columns.number[unit, self.unit]: float(more[at]) for unit, more in self.inside}
        moments = [(float(held[at]), row)]
        for holder, n_bytes, others in self.back:
            more_back = {columns.number[self.unit, holder]: float(n_bytes)}
            more_back |= {columns.number[unit, holder]: -float(less) for unit, less in others.items()}
            excess = held[at] + sum(n * x[column] for column, n in more_back.items())
            moments.append((float(excess), {c: row.get(c, 0.0) + more_back.get(c, 0.0) for c in {**row, **more_back}}))
        return moments


def reruns_of(replay: Replay, candidates: Candidates, *, stash_bytes: int) -> tuple[Rerun, ...]:
    """The reruns of every call of every candidate."""
    inside: list[list[int]] = [[] for _ in candidates.units]
    for i, above in enumerate(candidates.around):
        for j in above:
            inside[j].append(i)
    return tuple(
        _rerun(replay, candidates, (unit, call), inside, stash_bytes=stash_bytes)
        for unit, one in enumerate(candidates.units)
        for call in one.calls
    )


def _rerun(
    replay: Replay, candidates: Candidates, which: tuple[int, SavedByCall], inside: list[list[int]], *, stash_bytes: int
) -> Rerun:
    unit, call = which
    within = list(_inside(candidates, inside[unit], call))
    if within:
        alive, parts = _moments(replay, call, within, stash_bytes=stash_bytes)
    else:
        alive, parts = np.array([call.again_bytes], dtype=np.int64), ()
    around = [
        (j, other) for j in candidates.around[unit] for other in candidates.units[j].calls
        if other.begins == call.begins and other.first <= call.first and call.end <= other.end
    ]  # fmt: skip
    return Rerun(
        unit=unit,
        tick=max(call.begins - 1, 0),
        alive=alive + stash_bytes - call.late_bytes,
        inside=parts,
        back=tuple(_back(replay, candidates, (unit, call), one, inside[one[0]]) for one in around),
    )


def _inside(candidates: Candidates, units: list[int], outer: SavedByCall) -> Iterator[tuple[int, SavedByCall]]:
    for unit in units:
        for call in candidates.units[unit].calls:
            if outer.first <= call.first and call.end <= outer.end:
                yield unit, call


def _moments(
    replay: Replay, call: SavedByCall, within: list[tuple[int, SavedByCall]], *, stash_bytes: int
) -> tuple[Bytes, tuple[tuple[int, Bytes], ...]]:
    """Bytes alive at each allocation of the rerun, and the change of these bytes by each unit inside.

    The rerun repeats forward up to the last saved tensor.
    """
    inner = np.append(call.entries[~np.isin(call.entries, call.outputs)], np.array(call.saved_outputs, dtype=np.int64))
    last = int(replay.born[inner].max(initial=call.first))
    entries = replay.between(call.first, last)
    size, born, died = replay.size[entries], replay.born[entries], replay.died[entries]
    moments = np.unique(born)
    alive = _sum_at(moments, born, died, size)
    place = {entry: k for k, entry in enumerate(entries.tolist())}
    tail = int(inner[replay.born[inner].argmax()]) if len(inner) else None
    by_unit: dict[int, Bytes] = {}
    for unit, one in within:
        pairs = zip(one.entries.tolist(), one.leaves.tolist())
        mine = [(place[entry], leaves) for entry, leaves in pairs if entry in place]
        at = np.array([k for k, _ in mine], dtype=np.int64)
        freed = _sum_at(moments, np.array([leaves for _, leaves in mine], dtype=np.int64), died[at], size[at])
        if tail is not None and (tail in one.entries or tail in one.saved_outputs):
            freed = np.where(moments > one.first, alive, freed)
        given = np.array([place[entry] for entry in set(one.inputs) if entry in place], dtype=np.int64)
        kept = _sum_at(moments, died[given], np.full(len(given), FOREVER), size[given])
        kept = kept + stash_bytes * (moments > one.first)
        by_unit[unit] = by_unit.get(unit, 0) + kept - freed
    return alive, tuple(by_unit.items())


def _sum_at(moments: Bytes, born: Bytes, died: Bytes, size: Bytes) -> Bytes:
    """Bytes alive at each of `moments`, from entries with `born`, `died` and `size`."""
    some = born < died
    steps = np.zeros(len(moments) + 1, dtype=np.int64)
    np.add.at(steps, np.searchsorted(moments, born[some]), size[some])
    np.subtract.at(steps, np.searchsorted(moments, died[some]), size[some])
    return np.cumsum(steps[:-1])


def _back(
    replay: Replay,
    candidates: Candidates,
    which: tuple[int, SavedByCall],
    around: tuple[int, SavedByCall],
    siblings: list[int],
) -> tuple[int, int, dict[int, int]]:
    """Bytes that the candidate around restores just before `which` runs again, as in `Rerun.back`."""
    (unit, call), (holder, outer) = which, around
    gone = outer.entries[(outer.leaves < outer.begins) & ~np.isin(outer.entries, call.entries)]
    others: dict[int, int] = {}
    for sibling, one in _inside(candidates, siblings, outer):
        if sibling != unit:
            less = int(replay.size[gone[np.isin(gone, one.entries)]].sum())
            if less:
                others[sibling] = others.get(sibling, 0) + less
    return holder, int(replay.size[gone].sum()), others
