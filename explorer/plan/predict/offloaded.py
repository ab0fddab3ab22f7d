"""The keep-all step with some units offloaded: a timeline to which every rule of recompute applies afterwards.

    kept        saved ──────────────────────────────────── read ── released
    offloaded   saved ─ let go          (on the host)      read, a copy ─┘

1. A tensor that only offloaded units save is freed when the code of forward lets go of it. If a kept operation saves it
   too, the tensor stays until that operation has run.
2. Each operation that reads the tensor in backward brings a copy. The copy dies when the operation ends, before sums
   that bring its results to their shapes. An operation that reads one view twice shares the copy.
3. Each call of a unit holds one copy of a view on the host, until autograd releases the last operation that saved it.
4. Parameters stay on the device. What other code holds, such as the batch, stays there too, and is copied all the same.

Source: engine/policy/offload.py, which does this.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from explorer.plan.memory.ledger import Bytes, array_of, ints
from explorer.plan.names import is_within
from explorer.plan.predict.calls import SavedByCall
from explorer.plan.predict.replay import SUM, Replay
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import Column, column
from explorer.record.measurement import Measurement
from explorer.record.policy import Unit

PARAMETER = ROLES.index("parameter")
ALIKE = ("role", "op", "dtype", "stream", "line")
"""Columns in which a copy is as the tensor of forward."""


class Offloaded(NamedTuple):
    """A keep-all step with offloaded units."""

    run: Measurement
    saved_outside: dict[str, tuple[bool, ...]]
    """As `Replay.saved_outside`, of the operations that are left on the device."""
    host_peak_bytes: int
    """Most bytes that the host holds at once."""
    moved_bytes: int
    """Bytes that cross between device and host in a step, both ways."""


class _Crossing(NamedTuple):
    """A view that one call of a unit moves: its first row, bytes, stretch on the host, and stretches of its copies."""

    row: int
    n_bytes: int
    first: int
    end: int
    copies: list[tuple[int, int]]


def with_offload(run: Measurement, replay: Replay, units: Sequence[Unit]) -> Offloaded:
    """The step `run`, which keeps everything, with `units` offloaded. `replay` is that of `run`."""
    log = run.allocations
    assert log is not None, "it was replayed"
    entry, released = array_of(log.saves.entry), array_of(log.saves.released_tick)
    calls = _calls_of_rows(log, replay, units)
    crossings = list(_crossings(log, replay, calls))
    died = _deaths(replay, entry, released, calls >= 0)
    copies = [(crossing, *stretch) for crossing in crossings for stretch in crossing.copies]
    sources = entry[[crossing.row for crossing, _, _ in copies]].tolist() if copies else []

    def longer(name: str, more: Iterable[int]) -> Column:
        values = getattr(log, name)
        return column([*values, *more]) if values else values

    alike = {name: longer(name, map(getattr(log, name).__getitem__, sources)) for name in ALIKE if getattr(log, name)}
    changed = replace(
        log,
        n_bytes=longer("n_bytes", (crossing.n_bytes for crossing, _, _ in copies)),
        born=longer("born", (first for _, first, _ in copies)),
        died=column([*died.tolist(), *(end for _, _, end in copies)]),
        block=longer("block", (log.saves.block[crossing.row] for crossing, _, _ in copies)),
        released=longer("released", (0 for _ in copies)),
        **alike,
    )
    host: list[tuple[int, int]] = []
    for crossing in crossings:
        host += [(crossing.first, crossing.n_bytes), (crossing.end, -crossing.n_bytes)]
    steps = np.cumsum([n_bytes for _, n_bytes in sorted(host)])
    return Offloaded(
        run=replace(run, allocations=changed),
        saved_outside=_saved_outside(log, replay, calls >= 0),
        host_peak_bytes=int(steps.max(initial=0)),
        moved_bytes=sum(crossing.n_bytes * (1 + len(crossing.copies)) for crossing in crossings),
    )


def as_calls(run: Measurement, replay: Replay, unit: Unit) -> list[SavedByCall]:
    """What offload of `unit` frees and copies at least, as calls of a planner's program, without a rerun.

    A tensor that other units save too counts as freed: they may be offloaded with this one.
    """
    log = run.allocations
    assert log is not None, "it was replayed"
    calls, entry = _calls_of_rows(log, replay, (unit,)), array_of(log.saves.entry)
    died = _deaths(replay, entry, array_of(log.saves.released_tick), np.ones(len(entry), dtype=np.bool_))
    freed = np.unique(entry[calls >= 0])
    freed = freed[died[freed] < replay.died[freed]]
    copies = [
        (*stretch, crossing.n_bytes) for crossing in _crossings(log, replay, calls) for stretch in crossing.copies
    ]

    nothing = SavedByCall(
        first=0,
        entries=ints([]),
        freed_at=ints([]),
        backward_begins=0,
        backward_ends=0,
        end=0,
        rerun_ends=0,
        inputs=(),
        outputs=(),
        saved_outputs=(),
        late_bytes=0,
        rerun_bytes=0,
        copies=tuple(copies),
    )
    of_entries = [
        dataclasses.replace(
            nothing, entries=ints([one]), freed_at=died[[one]], backward_begins=int(replay.died[one]), copies=()
        )
        for one in freed.tolist()
    ]
    return [*of_entries, nothing]


def _calls_of_rows(log: Allocations, replay: Replay, units: Sequence[Unit]) -> Bytes:
    """A number for the call of a unit of `units` that moves each row, -1 for a row that stays."""
    calls = np.full(len(log.saves.entry), -1)
    block, tick = array_of(log.saves.block), array_of(log.saves.saved_tick)
    n_calls = 0
    for unit in units:
        inside = np.array([is_within(fqn, *unit.blocks) for fqn in log.blocks])[block]
        firsts = [call.first for call in replay.calls.get(unit.blocks[0], ())]
        calls[inside] = n_calls + np.searchsorted(firsts, tick[inside], side="right")
        n_calls += len(firsts) + 1
    calls[array_of(log.role)[array_of(log.saves.entry)] == PARAMETER] = -1
    return calls


def _deaths(replay: Replay, entry: Bytes, released: Bytes, is_moved: np.ndarray) -> Bytes:
    """When each entry dies, by rule 1."""
    died, last, kept = replay.died.copy(), np.zeros(len(replay.died), dtype=np.int64), replay.born + 1
    np.maximum.at(last, entry, released)
    np.maximum.at(kept, entry[~is_moved], released[~is_moved] + 1)
    moved = np.unique(entry[is_moved])
    # The last release is what frees the entry, if nothing is born between the two. At the end of the step other code
    # holds what autograd has released.
    following = replay.births[
        np.searchsorted(replay.births, last[moved], side="right").clip(max=len(replay.births) - 1)
    ]
    freed = moved[(died[moved] < following) | (died[moved] <= last[moved])]
    for cast in np.intersect1d(freed, replay.casts).tolist():  # autocast holds a cast weight until forward ends
        kept[cast] = max(kept[cast], replay.forward_ends(int(replay.born[cast])))
    died[freed] = np.minimum(died[freed], np.maximum(replay.let_go[freed], kept[freed]))
    return died


def _saved_outside(log: Allocations, replay: Replay, is_moved: np.ndarray) -> dict[str, tuple[bool, ...]]:
    moved, kept_in = set[int](), defaultdict[int, set[str]](set)
    for entry, block, moves in zip(log.saves.entry, log.saves.block, is_moved.tolist()):
        if moves:
            moved.add(entry)
        else:
            kept_in[entry].add(log.blocks[block])

    def stays(entry: int, fqn: str) -> bool:
        return entry not in moved or any(not is_within(block, fqn) for block in kept_in[entry])

    flags = dict(replay.saved_outside)
    for fqn, calls in replay.calls.items():
        for call in calls:
            if len(call.outputs) == len(flags.get(fqn, ())):
                flags[fqn] = tuple(flag and stays(entry, fqn) for flag, entry in zip(flags[fqn], call.outputs))
    return flags


def _crossings(log: Allocations, replay: Replay, calls: Bytes) -> Iterator[_Crossing]:
    saves = log.saves
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, call in enumerate(calls.tolist()):
        if call >= 0:
            rows_of[call, saves.view[row]].append(row)
    sums = [i for i, name in enumerate(log.ops) if name == SUM]
    made = ~np.isin(array_of(log.op)[replay.by_birth], sums)
    births = replay.births[:-1][made]
    for rows in rows_of.values():
        stretches = sorted(
            _copy(births, saves.read_tick[row], saves.released_tick[row])
            for row in rows
            if saves.read_tick[row] <= log.n_ticks
        )
        copies: list[tuple[int, int]] = []
        for first, end in stretches:
            if copies and first < copies[-1][1]:
                first, end = copies[-1][0], max(copies.pop()[1], end)
            copies.append((first, end))
        yield _Crossing(
            row=rows[0],
            n_bytes=saves.n_bytes[rows[0]],
            first=min(map(saves.saved_tick.__getitem__, rows)),
            end=max(map(saves.released_tick.__getitem__, rows)),
            copies=copies,
        )


def _copy(births: Bytes, read: int, released: int) -> tuple[int, int]:
    """The stretch of a copy that is made after tick `read`, and dies after the last birth before tick `released`."""
    place = int(np.searchsorted(births, released, side="right"))
    last = int(births[place - 1]) if place else 0
    if last <= read:
        return read, read + 1
    return read + 1, last + 1
