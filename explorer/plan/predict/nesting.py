"""Units inside other units: the call around each call, and the memory of rerunning an outer call.

    outer   |____ i1 ____ i2 ____ i3 ____|     forward keeps nothing inside but the generator state of each unit
    again   |____ i1 ____ i2 ____ ^            keeps the inputs of i1, i2, i3, and stops where i3 is entered
    then    i3 again, its backward, i2 again, its backward, ...

The inputs of an inner unit are kept from the rerun of the outer unit until the rerun of the inner unit.
Source: torch.utils.checkpoint, rules 4 and 5 of its note on nesting and early stop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from explorer.plan.memory.ledger import Bytes
from explorer.plan.names import above
from explorer.plan.predict.calls import FOREVER, NOTHING, SavedByCall, most_at_once
from explorer.plan.predict.replay import Replay
from explorer.plan.predict.step_cost import stops_inside
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

NO_PARENT = -1


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

    def below(self, i: int) -> list[int]:
        """Indices of all calls inside call `i`."""
        return [k for j in self.inside.get(i, ()) for k in (j, *self.below(j))]

    def above(self, i: int) -> list[int]:
        """Indices of the calls around call `i`, innermost first."""
        outer = []
        while (i := self.parent[i]) != NO_PARENT:
            outer.append(i)
        return outer


def flat(calls: Sequence[SavedByCall]) -> Nest:
    """The nest of `calls` if none lies inside another."""
    n = len(calls)
    return Nest(calls=tuple(calls), parent=(NO_PARENT,) * n, stops_inside=(False,) * n, inside={})


def nest_of(policy: Policy, calls: Mapping[Unit, Sequence[SavedByCall]], graph: ModelGraph | None) -> Nest:
    """The nest of all calls of the units of `policy`."""
    outer = enclosing(policy)
    if not outer:
        return flat([call for own in calls.values() for call in own])
    order = sorted(calls, key=lambda unit: _depth(unit, outer))
    in_order: list[SavedByCall] = []
    parent: list[int] = []
    stops: list[bool] = []
    places: dict[Unit, range] = {}
    for unit in order:
        holders = [i for above in _chain(unit, outer) for i in places[above]]
        places[unit] = range(len(in_order), len(in_order) + len(calls[unit]))
        children = [child for child, holder in outer.items() if holder == unit]
        for call in calls[unit]:
            around = (i for i in holders if in_order[i].first <= call.first and call.end <= in_order[i].end)
            parent.append(next(around, NO_PARENT))
            stops.append(policy.stops_early and any(stops_inside(graph, unit, child) for child in children))
            in_order.append(call)
    directly: dict[int, list[int]] = defaultdict(list)
    for i, holder in enumerate(parent):
        if holder != NO_PARENT:
            directly[holder].append(i)
    return Nest(calls=tuple(in_order), parent=tuple(parent), stops_inside=tuple(stops), inside=directly)


@lru_cache(maxsize=32)
def enclosing(policy: Policy) -> Mapping[Unit, Unit]:
    """The innermost unit around each unit that lies inside others."""
    named = {fqn: unit for unit in policy.units for fqn in unit.blocks}
    holders = {}
    for unit in policy.units:
        holder = next((fqn for fqn in above(unit.blocks[0]) if fqn in named), None)
        if holder is not None:
            holders[unit] = named[holder]
    return holders


def again_bytes(replay: Replay, nest: Nest, i: int, *, stash_bytes: int) -> int:
    """Peak bytes of rerunning call `i`, if the units inside it keep nothing."""
    call, inside = nest.calls[i], nest.inside.get(i, ())
    if not inside:
        return call.again_bytes
    children, below = [nest.calls[j] for j in inside], [nest.calls[j] for j in nest.below(i)]
    entered = max(child.first if nest.stops_inside[i] else child.end for child in children)
    last = _last_tick(replay, call, below, entered)
    entries = replay.between(call.first, last)
    born, died = replay.born[entries], replay.died[entries].copy()
    place = {entry: k for k, entry in enumerate(entries.tolist())}
    for one in below:
        for entry, leaves in zip(one.entries.tolist(), _leaves_again(replay, one).tolist()):
            if entry in place:
                died[place[entry]] = min(int(died[place[entry]]), leaves)
    for entry in {entry for child in children for entry in child.inputs if entry in place}:
        died[place[entry]] = FOREVER  # an input that the inner unit keeps
    if len(replay.casts):
        died[np.isin(entries, replay.casts)] = FOREVER
    # The unit that the rerun stops at has already stashed its generator state.
    begun = [one.first for one in below if one.first < last]
    begun += [one.first for one in children if nest.stops_inside[i] and one.first == last]
    return call.statistics_bytes + most_at_once(
        np.concatenate((replay.size[entries], np.full(len(begun), stash_bytes))),
        np.concatenate((born, np.array(begun, dtype=np.int64))),
        np.concatenate((died, np.full(len(begun), FOREVER))),
    )


def _leaves_again(replay: Replay, call: SavedByCall) -> Bytes:
    """The tick at which a rerun frees each of `call.entries`: not before the last saved tensor, often an output."""
    last = max((int(replay.born[entry]) for entry in call.saved_outputs), default=0)
    later = np.minimum(np.maximum(call.leaves, last + 1), replay.let_go[call.entries])
    return np.where(np.isin(call.entries, call.outputs), call.leaves, np.maximum(call.leaves, later))


def entries_restored_with(nest: Nest, i: int, owner: Bytes) -> Bytes:
    """Entries that calls around call `i` restore, or keep for inner calls, at the tick at which `i` begins."""
    parts = [np.array(nest.calls[i].inputs, dtype=np.int64)]
    for j in nest.above(i):
        if nest.calls[j].begins == nest.calls[i].begins:
            entries = nest.calls[j].entries
            parts.append(entries[owner[entries] == j])
            parts += [np.array(nest.calls[k].inputs, dtype=np.int64) for k in nest.inside[j]]
    return np.unique(np.concatenate(parts))


def _last_tick(replay: Replay, call: SavedByCall, below: Sequence[SavedByCall], entered: int) -> int:
    """The tick at which a rerun ends: the last tensor saved outside of inner units, or tick `entered` if later."""
    theirs = [part for one in below for part in (one.entries, np.array(one.saved_outputs))]
    within = np.concatenate([NOTHING, *theirs])
    own = call.entries[~np.isin(call.entries, call.outputs)]
    own = np.setdiff1d(np.concatenate((own, np.array(call.saved_outputs, dtype=np.int64))), within)
    return max(entered, int(replay.born[own].max(initial=call.first)))


def _chain(unit: Unit, outer: Mapping[Unit, Unit]) -> list[Unit]:
    holders = []
    while unit in outer:
        unit = outer[unit]
        holders.append(unit)
    return holders


def _depth(unit: Unit, outer: Mapping[Unit, Unit]) -> int:
    return len(_chain(unit, outer))
