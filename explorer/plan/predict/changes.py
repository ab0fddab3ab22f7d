"""Changes of a measured timeline if some units are recomputed: freed bytes, bytes held longer, bytes made twice.

    held  ________                      ________
          forward |____________________|        kept -> recomputed: the shaded bytes are gone,
          of b    fe ////////////////// rb      the peak may now be at rb (the recompute itself)

calls.py has the changes of one call; this file combines calls by rules 1, 2, 3 and 7 of this room. Units inside units:

    outer   |____ i1 ____ i2 ____ i3 ____|     forward keeps nothing inside but the generator state of each unit
    again   |____ i1 ____ i2 ____ ^            keeps the inputs of i1, i2, i3, and stops where i3 is entered
    then    i3 again, its backward, i2 again, its backward, ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes, Mask, ints
from explorer.plan.names import above
from explorer.plan.predict.calls import SavedByCall, kept_by_containers, most_at_once
from explorer.plan.predict.replay import NEVER, Replay
from explorer.plan.predict.step_cost import stops_inside
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

NO_PARENT = -1
Changes = NDArray[np.int64]
"""First ticks, end ticks, and bytes more than measured between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """Calls of units, outer calls first, and the call around each call."""

    calls: tuple[SavedByCall, ...]
    parent: tuple[int, ...]
    """Index in `calls` of the innermost call around each call, or NO_PARENT."""
    stops_inside: tuple[bool, ...]
    """True if the rerun of the call ends where its last inner unit is entered, by call."""
    inside: Mapping[int, Sequence[int]]
    """Indices of the calls directly inside a call, by index of a call that contains some."""
    names: tuple[str, ...]
    """The first block of the unit of each call."""
    stash_bytes: int
    """Generator state that each call keeps (rule 3)."""

    def below(self, i: int) -> list[int]:
        """Indices of all calls inside call `i`."""
        return [k for j in self.inside.get(i, ()) for k in (j, *self.below(j))]

    def above(self, i: int) -> list[int]:
        """Indices of the calls around call `i`, innermost first."""
        outer = []
        while (i := self.parent[i]) != NO_PARENT:
            outer.append(i)
        return outer


def nest_of(
    policy: Policy,
    calls: Mapping[Unit, Sequence[SavedByCall]],
    graph: ModelGraph | None = None,
    *,
    stash_bytes: int = 0,
) -> Nest:
    """The nest of all calls of the units of `policy`."""
    outer = units_around(policy)
    order = sorted(calls, key=lambda unit: len(outer[unit]))
    in_order: list[SavedByCall] = []
    parent: list[int] = []
    stops: list[bool] = []
    places: dict[Unit, range] = {}
    for unit in order:
        holders = [i for holder in outer[unit] for i in places[holder]]
        places[unit] = range(len(in_order), len(in_order) + len(calls[unit]))
        children = [child for child, around in outer.items() if around[:1] == (unit,)]
        stops_there = policy.stops_early and any(stops_inside(graph, unit, child) for child in children)
        stops += [stops_there] * len(calls[unit])
        for call in calls[unit]:
            around = (i for i in holders if in_order[i].first <= call.first and call.end <= in_order[i].end)
            parent.append(next(around, NO_PARENT))
            in_order.append(call)
    directly: dict[int, list[int]] = defaultdict(list)
    for i, holder in enumerate(parent):
        if holder != NO_PARENT:
            directly[holder].append(i)
    return Nest(
        calls=tuple(in_order),
        parent=tuple(parent),
        stops_inside=tuple(stops),
        inside=directly,
        names=tuple(unit.blocks[0] for unit in order for _ in calls[unit]),
        stash_bytes=stash_bytes,
    )


@lru_cache(maxsize=32)
def units_around(policy: Policy) -> Mapping[Unit, tuple[Unit, ...]]:
    """The units around each unit of `policy`, innermost first: longer segments of the same blocks, then ancestors."""
    named: dict[str, list[Unit]] = defaultdict(list)
    for unit in sorted(policy.units, key=lambda unit: len(unit.blocks)):
        for fqn in unit.blocks:
            named[fqn].append(unit)
    around = {}
    for unit in policy.units:
        first = unit.blocks[0]
        longer = [other for other in named[first] if set(unit.blocks) < set(other.blocks)]
        around[unit] = (*longer, *(other for fqn in above(first) for other in named.get(fqn, ())))
    return around


def rerun_bytes(replay: Replay, nest: Nest, i: int) -> int:
    """Peak bytes of rerunning call `i`, if the units inside it keep nothing."""
    call, inside = nest.calls[i], nest.inside.get(i, ())
    if not inside:
        return call.rerun_bytes
    entries, died, last = rerun_events(replay, nest, i)
    # The unit that the rerun stops at has already stashed its generator state.
    begun = [nest.calls[j].first for j in nest.below(i) if nest.calls[j].first < last]
    begun += [nest.calls[j].first for j in inside if nest.stops_inside[i] and nest.calls[j].first == last]
    return call.statistics_bytes + most_at_once(
        np.concatenate((replay.size[entries], np.full(len(begun), nest.stash_bytes))),
        np.concatenate((replay.born[entries], ints(begun))),
        np.concatenate((died, np.full(len(begun), NEVER))),
    )


def rerun_events(replay: Replay, nest: Nest, i: int) -> tuple[Bytes, Bytes, int]:
    """The entries that a rerun of call `i` makes, the tick of forward at which it frees each, and its last tick."""
    call, inside = nest.calls[i], nest.inside.get(i, ())
    if not inside:
        entries = np.setdiff1d(replay.between(call.first, call.rerun_ends), [entry for entry, *_ in call.kept_results])
        return entries, replay.died[entries], call.rerun_ends
    children, below = [nest.calls[j] for j in inside], [nest.calls[j] for j in nest.below(i)]
    # The last tensor saved outside of inner units, or the entry of the last of these, if that is later.
    theirs = [part for inner in below for part in (inner.entries, ints(inner.saved_outputs))]
    saved = call.entries[~np.isin(call.entries, call.outputs)]
    saved = np.setdiff1d(np.concatenate((saved, ints(call.saved_outputs))), joined(theirs))
    entered = max(child.first if nest.stops_inside[i] else child.end for child in children)
    last = max(entered, int(replay.born[saved].max(initial=call.first)))
    died = replay.died.copy()
    for inner in below:
        died[inner.entries] = np.minimum(died[inner.entries], freed_again_at(replay, inner))
    for child in children:
        died[list(child.inputs)] = NEVER
    died[replay.casts] = NEVER
    entries = replay.between(call.first, last)
    return entries, died[entries], last


def freed_again_at(replay: Replay, call: SavedByCall) -> Bytes:
    """The tick at which a rerun frees each of `call.entries`: not before the last saved tensor, often an output."""
    last = max((int(replay.born[entry]) for entry in call.saved_outputs), default=0)
    later = np.minimum(np.maximum(call.freed_at, last + 1), replay.let_go[call.entries])
    inferred = np.where(np.isin(call.entries, call.outputs), call.freed_at, np.maximum(call.freed_at, later))
    return np.where(replay.released[call.entries] > 0, replay.released[call.entries], inferred)


class Stretches(NamedTuple):
    """Stretches in which entries are held: entry, first tick, and the tick after the last."""

    entry: Bytes
    first: Bytes
    end: Bytes


class Simulation(Record):
    """The replay if all calls of a nest are recomputed."""

    replay: Replay
    nest: Nest
    changes: Changes
    saved_bytes: int
    """Bytes saved at the end of forward minus the measured ones: negative if entries are freed."""
    away: Mask
    """Whether each entry is freed by the end of forward."""
    lives: Stretches
    """The stretches of every entry that a call frees, keeps or makes again."""
    owner: Bytes
    """The innermost call that makes each entry again, or -1."""
    never: Sequence[int] = ()
    """Entries that no rerun makes again for later."""

    @cached_property
    def stretches(self) -> tuple[NDArray[np.intp], Bytes]:
        """First ticks of the stretches of constant offset to the measured line, and the offsets in bytes."""
        return offsets_of(self.changes, len(self.replay.line))

    @property
    def peak_bytes(self) -> int:
        """The peak of the changed line, reruns included."""
        bounds, offsets = self.stretches
        peak = int((np.maximum.reduceat(self.replay.line, bounds) + offsets).max())
        return max([peak, *(most for _, most in self.reruns())])

    @property
    def line(self) -> Bytes:
        """The changed line. The peak of each rerun stands at the event before the backward of its call."""
        bounds, offsets = self.stretches
        line = self.replay.line + np.repeat(offsets, np.diff(np.append(bounds, len(self.replay.line))))
        for tick, most in self.reruns():
            line[tick] = max(line[tick], most)
        return line

    def reruns(self) -> Iterator[tuple[int, int]]:
        """The event before each rerun, and the most bytes held during the rerun."""
        replay, nest, (bounds, offsets) = self.replay, self.nest, self.stretches
        before = [max(call.backward_begins - 1, 0) for call in nest.calls]
        places = np.searchsorted(bounds, before, side="right") - 1
        for i, (call, tick, place) in enumerate(zip(nest.calls, before, places)):
            base = int(replay.line[tick] + offsets[place]) - call.late_bytes
            if nest.parent[i] >= 0:
                restored = np.setdiff1d(self._restored_with(i), self.never)
                base += int(replay.size[restored[~self.held_at(tick)[restored]]].sum())
            # Rule 3: the present state of the generator.
            yield tick, base + rerun_bytes(replay, nest, i) + nest.stash_bytes

    def held_at(self, tick: int) -> Mask:
        """Mask of the entries held at `tick`, without the entries of a rerun."""
        is_held = (self.replay.born <= tick) & (tick < self.replay.died)
        entry, first, end = self.lives
        is_held[entry] = False
        is_held[entry[(first <= tick) & (tick < end)]] = True
        return is_held

    def _restored_with(self, i: int) -> Bytes:
        """Entries that calls around call `i` restore, or keep for inner calls, at the tick at which `i` begins."""
        nest = self.nest
        parts = [ints(nest.calls[i].inputs)]
        for j in nest.above(i):
            if nest.calls[j].backward_begins == nest.calls[i].backward_begins:
                entries = nest.calls[j].entries
                parts.append(entries[self.owner[entries] == j])
                parts += [ints(nest.calls[k].inputs) for k in nest.inside[j]]
        return np.unique(np.concatenate(parts))


def simulate(replay: Replay, nest: Nest, border: int | None) -> Simulation:
    """The simulation of `nest`. Tick `border` is the end of forward, None if not reached."""
    nested = [i for i, call in enumerate(nest.calls) if call.in_containers and nest.parent[i] != NO_PARENT]
    until, never = kept_by_containers(replay, [(nest.calls[i], nest.calls[nest.above(i)[-1]]) for i in nested])
    owner, freed_at, back_at = _absences(replay, nest, list(never))
    extended = _inputs_and_results(replay, nest, until)
    born, died, size = replay.born, replay.died, replay.size
    absent = np.flatnonzero(owner >= 0)
    touched = np.union1d(absent, extended.entry)
    lives = _merged(
        [
            Stretches(touched, born[touched], np.where(owner >= 0, freed_at, died)[touched]),
            Stretches(absent, back_at[absent], replay.restored_until[absent]),
            extended,
        ],
        len(replay.line) + 2,
    )
    # What the checkpoints hold beside the entries: generator states, copies of statistics, tensors inside containers.
    states = [(call.first, call.backward_ends, nest.stash_bytes) for call in nest.calls]
    copies = [copy for call in nest.calls for copy in call.copies]
    inside = [(int(min(freed_at[entry], died[entry])), end, int(size[entry])) for entry, end in until.items()]
    inside = [(first, end, n_bytes) for first, end, n_bytes in inside if first < end]
    beside = ints([*states, *copies, *inside]).reshape(-1, 3).T
    saved, away = 0, np.zeros(len(size), dtype=bool)
    if border is not None:
        is_kept = np.zeros(len(size), dtype=bool)
        is_kept[extended.entry[(extended.first <= border) & (border < extended.end)]] = True
        # An entry freed right after the last event of forward counts as freed at the end of forward.
        away = (owner >= 0) & (freed_at <= border + 1) & (border < back_at) & ~is_kept
        saved = int(size[is_kept & (died <= border)].sum()) - int(size[away].sum())
        saved += sum(n_bytes for first, end, n_bytes in (*states, *inside) if first <= border < end)
    measured = (born[touched], died[touched], -size[touched])
    simulated = (lives.first, lives.end, size[lives.entry])
    return Simulation(
        replay=replay,
        nest=nest,
        changes=np.hstack((measured, simulated, beside)),
        saved_bytes=saved,
        away=away,
        lives=lives,
        owner=owner,
        never=list(never),
    )


def _absences(replay: Replay, nest: Nest, never: Sequence[int]) -> tuple[Bytes, Bytes, Bytes]:
    """By entry: the innermost call that makes it again (-1: none), the tick at which it is freed, and is back.

    Of several calls the first decides when an entry is freed, the innermost when it is back (rule 1).
    """
    calls, n_entries = nest.calls, [len(call.entries) for call in nest.calls]
    entries = joined([call.entries for call in calls])
    owner, freed_at, back_at = (np.full(len(replay.size), value) for value in (-1, NEVER, 0))
    owner[entries] = np.repeat(np.arange(len(calls)), n_entries)  # inner calls come last
    np.minimum.at(freed_at, entries, joined([call.freed_at for call in calls]))
    back_at[entries] = np.repeat([call.backward_begins for call in calls], n_entries)
    back_at[never] = replay.died[never]
    return owner, freed_at, back_at


def _inputs_and_results(replay: Replay, nest: Nest, in_containers: Collection[int]) -> Stretches:
    """Inputs that checkpoints keep (rule 2), and results of kept operators (rule 6)."""
    stretches: list[tuple[int, int, int]] = []
    for call, parent in zip(nest.calls, nest.parent):
        is_outer = parent == NO_PARENT
        first, end = 0, call.backward_ends
        if not is_outer:
            first, end = nest.calls[parent].backward_begins, call.backward_begins
        stretches += [(entry, first, end) for entry in call.inputs if is_outer or entry not in in_containers]
        stretches += call.kept_results
    entries, firsts, ends = ints(stretches).reshape(-1, 3).T
    return Stretches(entries, np.maximum(firsts, replay.born[entries]), ends)


def _merged(parts: Sequence[Stretches], length: int) -> Stretches:
    """All stretches in a timeline of `length` ticks, touching or overlapping stretches of an entry merged."""
    entry, first, end = (np.concatenate(columns) for columns in zip(*parts))
    is_some = first < end
    entry, first, end = entry[is_some], first[is_some], np.minimum(end[is_some], length - 1)
    order = np.argsort(entry * length + first, kind="stable")
    start, stop = (entry * length + first)[order], np.maximum.accumulate((entry * length + end)[order])
    new = np.flatnonzero(np.append(True, start[1:] > stop[:-1])) if len(start) else np.zeros(0, dtype=np.intp)
    last = np.append(new[1:], len(start)) - 1 if len(new) else new
    return Stretches(entry[order][new], start[new] % length, stop[last] % length)


def offsets_of(changes: Changes, length: int) -> tuple[NDArray[np.intp], Bytes]:
    """First ticks of the stretches of constant offset in a line of `length` ticks, and the offsets in bytes."""
    first, end, size = changes if (changes[0] < changes[1]).all() else changes[:, changes[0] < changes[1]]
    ticks = np.concatenate((first, end))
    order = np.argsort(ticks, kind="stable")  # quick where calls come one after the other: long stretches are in order
    ticks, sums = ticks[order], np.cumsum(np.concatenate((size, -size))[order])
    last = np.append(ticks[1:] != ticks[:-1], True)[: len(ticks)] & (ticks < length)
    bounds, offsets = ticks[last], sums[last]
    if len(bounds) and not bounds[0]:
        return bounds, offsets
    return np.concatenate(([0], bounds)), np.concatenate(([0], offsets))


def joined(parts: Sequence[Bytes]) -> Bytes:
    """`parts` concatenated; an empty array if there are none."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int64), *parts])
