"""A measured timeline played through with some units recomputed: what leaves it, what stays longer, what comes twice.

    held  ________                      ________
          forward |____________________|        kept -> recomputed: the shaded bytes are gone,
          of b    fe ////////////////// rb      the peak may now be at rb (the recompute itself)

1. What a call saves for its own backward leaves when its forward ends and is back when its backward begins. In a
   segment that happens block by block on the way out, and for all of its blocks at once on the way back. An output
   leaves where the graph says that nobody else saves it, once the last block that was given it is through.
2. The inputs of a call are kept by its checkpoint until then, also where nobody else held them so long: a skip that
   the unit concatenates, a row of an embedding.
3. So is the state of torch's generator, where a checkpoint takes it on the CPU.
4. Running forward again holds its scratch once more.

Not foreseen: what a kernel keeps for itself; without a graph, outputs that nobody else saves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.series import Bytes, array_of, held
from explorer.record.graph import ModelGraph
from explorer.record.measurement import PHASES, ROLES, Calls, Measurement, PhaseSpan
from explorer.record.policy import Policy

FORWARD, RECOMPUTE, BACKWARD = (PHASES.index(phase) for phase in ("forward", "recompute", "backward"))
SAVED = ROLES.index("saved activation")
RNG_STATE_BYTES = 5056
"""Of torch's CPU generator (torch.get_rng_state), which every checkpoint call keeps; a GPU's state lies on the CPU."""
Changes = NDArray[np.int64]
"""Rows of (first tick, end tick, bytes more than measured between them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One forward call of a block. What it allocated is born after `first` and not after `end`."""

    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """What one call of a unit leaves behind for its backward, and would not if it were recomputed."""

    first: int
    """Last tick before the call."""
    entries: Bytes
    leaves: Bytes
    """First tick at which each of them would be gone."""
    begins: int
    """Tick at which backward of the call begins."""
    inputs: tuple[int, ...]
    again_bytes: int
    """Most that running forward again holds at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A timeline and its entries, sorted by birth and by block as well; built once, asked at every toggle."""

    line: Bytes
    phase: NDArray[np.int8]
    """Index into PHASES of each tick; -1 outside all spans."""
    size: Bytes
    born: Bytes
    died: Bytes
    role: Bytes
    by_birth: NDArray[np.intp]
    births: Bytes
    """Ticks at which anything is born, ascending, and the tick behind the last."""
    by_block: NDArray[np.intp]
    """Entries such that everything below one fqn lies side by side."""
    keys: list[tuple[str, ...]]
    starts: NDArray[np.intp]
    """First place in `by_block` of each key, and the number of entries at the end."""
    calls: dict[str, list[Call]]
    used_until: dict[int, int]
    """Of each entry that went into a block, the tick at which the last such call ended."""
    saved_outside: dict[str, tuple[bool, ...]]
    """Of each output of a block, whether others save it; see `Block.outputs_saved_outside`."""

    @classmethod
    def of(cls, measurement: Measurement, graph: ModelGraph | None) -> Replay | None:
        """None where no timeline was recorded, or one that does not know the calls of blocks."""
        log = measurement.allocations
        if log is None or not measurement.phases or not len(log.calls.block):
            return None
        order = sorted(range(len(log.blocks)), key=lambda i: tuple(log.blocks[i].split(".")))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        ranks, born = rank[array_of(log.block)], array_of(log.born)
        calls = _calls(log.calls, log.blocks)
        by_block, by_birth = np.lexsort((born, ranks)), np.argsort(born, kind="stable")
        return cls(
            line=held(log),
            phase=_phase_of_tick(measurement.phases, log.n_ticks),
            size=array_of(log.n_bytes),
            born=born,
            died=array_of(log.died),
            role=array_of(log.role),
            by_birth=by_birth,
            births=np.append(born[by_birth], log.n_ticks + 1),
            by_block=by_block,
            keys=[tuple(log.blocks[i].split(".")) for i in order],
            starts=np.searchsorted(ranks[by_block], np.arange(len(order) + 1)),
            calls=calls,
            used_until=_used_until(calls),
            saved_outside={} if graph is None else {block.fqn: block.outputs_saved_outside for block in graph.blocks},
        )

    def below(self, fqn: str) -> NDArray[np.intp]:
        """Entries of `fqn` and of everything below it, in order of birth within each block."""
        parts = tuple(fqn.split("."))
        end = (*parts[:-1], parts[-1] + "\0")
        first, last = (self.starts[bisect_left(self.keys, key)] for key in (parts, end))
        return self.by_block[first:last]

    def between(self, first: int, end: int) -> NDArray[np.intp]:
        """Entries born after tick `first` and not after `end`, in order of birth."""
        places = np.searchsorted(self.births[:-1], (first, end), side="right")
        return self.by_birth[places[0] : places[1]]

    def born_in(self, fqn: str, entries: Bytes) -> int:
        """Bytes of those among `entries` that calls of `fqn` allocated."""
        calls, born = self.calls.get(fqn, []), self.born[entries]
        if not calls:
            return 0
        place = np.searchsorted([call.first for call in calls], born) - 1
        mine = (place >= 0) & (born <= np.array([call.end for call in calls])[place])
        return int(self.size[entries[mine]].sum())

    def peak_with(self, changes: Changes, stays: Sequence[Stay]) -> int:
        """The peak once `changes` are made, and each of `stays` comes back by running forward again."""
        bounds, offsets = offsets_of(changes, len(self.line))
        peak = int((np.maximum.reduceat(self.line, bounds) + offsets).max())
        before = [max(stay.begins - 1, 0) for stay in stays]
        places = np.searchsorted(bounds, before, side="right") - 1
        for stay, tick, place in zip(stays, before, places):
            late = int(self.size[stay.entries[stay.leaves >= stay.begins]].sum())  # gone and back at the same moment
            peak = max(peak, int(self.line[tick] + offsets[place]) - late + stay.again_bytes)
        return peak


def stays_of(replay: Replay, unit: Sequence[str], *, early_stop: bool) -> list[Stay]:
    """Of each call of the kept `unit`, a block or the blocks of a segment; of one that keeps nothing there is none."""
    calls = list(zip(*(replay.calls.get(fqn, []) for fqn in unit)))
    found = (_stay(replay, unit, members, alone=len(calls) == 1, early_stop=early_stop) for members in calls)
    return [stay for stay in found if stay is not None]


def stash_bytes(measurement: Measurement, policy: Policy) -> int:
    """Bytes that every checkpoint call keeps on the measured device for its generator."""
    return RNG_STATE_BYTES if policy.preserve_rng_state and measurement.environment.device == "cpu" else 0


def changes_of(replay: Replay, stays: Sequence[Stay], border: int | None, *, stash_bytes: int) -> tuple[Changes, int]:
    """All of `stays` recomputed: changes of the line, and of what is saved at the end of forward, tick `border`."""
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
    saved = 0
    if border is not None:
        saved += int(gone[(leaves <= border + 1) & (given <= border) & (border < begins), 2].sum())
        saved += int(kept[(kept[:, 0] <= border) & (border < kept[:, 1]), 2].sum())
    return np.concatenate((gone, kept, stashed)), saved


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
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _stay(
    replay: Replay, unit: Sequence[str], members: Sequence[Call], *, alone: bool, early_stop: bool
) -> Stay | None:
    first, end = members[0].first, members[-1].end
    born, died = replay.born, replay.died
    saved = replay.between(first, end)
    saved = saved[
        (replay.role[saved] == SAVED) & (replay.phase[np.minimum(died[saved], len(replay.line) - 1)] != FORWARD)
    ]
    own_outputs = _own_outputs(replay, unit[-1], members[-1])
    saved = saved[~np.isin(saved, [entry for entry in members[-1].outputs if entry not in own_outputs])]
    begins = _begins(replay, unit, end) if alone else None
    if begins is None:
        if not len(saved):
            return None
        begins = int(died[saved].min())
    # What dies earlier is held by the blocks behind it: recompute would not free it.
    saved = saved[died[saved] >= begins]
    inner = saved[~np.isin(saved, own_outputs)]
    last = int(born[inner].max(initial=first))
    again = replay.between(first, last if early_stop else end)
    return Stay(
        first=first,
        entries=saved,
        leaves=_leaves(replay, saved, members, own_outputs),
        begins=begins,
        inputs=members[0].inputs,
        again_bytes=_most_at_once(replay.size[again], born[again], died[again]),
    )


def _begins(replay: Replay, unit: Sequence[str], end: int) -> int | None:
    """First birth after forward inside the unit; None: its backward allocates nothing."""
    births = np.concatenate([replay.born[replay.below(fqn)] for fqn in unit])
    later = births[(births > end) & (replay.phase[births] >= RECOMPUTE)]
    return int(later.min()) if len(later) else None


def _own_outputs(replay: Replay, fqn: str, call: Call) -> list[int]:
    """Outputs that nobody else saves, and of which it is known who was given them."""
    flags = replay.saved_outside.get(fqn, ())
    if len(flags) != len(call.outputs):
        return []
    return [entry for entry, outside in zip(call.outputs, flags) if not outside and entry in replay.used_until]


def _leaves(replay: Replay, saved: NDArray[np.intp], members: Sequence[Call], own_outputs: Sequence[int]) -> Bytes:
    """Each entry leaves behind the last that its block saves, an output of a block behind the block after it."""
    born = replay.born[saved]
    leaves = np.zeros(len(born), dtype=np.int64)
    for call, following in zip(members, [*members[1:], members[-1]]):
        here = (born > call.first) & (born <= call.end)
        if here.any():
            leaves[here] = born[here].max() + 1
            output = here & (born == born[here].max()) & (call is not following)
            leaves[output] = following.end + 1
    for entry in own_outputs:
        leaves[saved == entry] = replay.used_until[entry] + 1
    return leaves


def _most_at_once(size: Bytes, born: Bytes, died: Bytes) -> int:
    """Peak of these entries alone, over the ticks at which one of them is born."""
    if not len(size):
        return 0
    births = np.sort(born)
    delta = np.zeros(len(births) + 1, dtype=np.int64)
    np.add.at(delta, np.searchsorted(births, born), size)
    np.subtract.at(delta, np.searchsorted(births, died), size)
    return int(np.cumsum(delta[:-1]).max())


def _calls(calls: Calls, blocks: Sequence[str]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = defaultdict(list)
    place = 0
    entries = calls.entries.tolist()
    for block, first, end, n_inputs, n_outputs in zip(
        calls.block, calls.first_tick, calls.end_tick, calls.n_inputs, calls.n_outputs
    ):
        outputs = place + n_inputs
        found[blocks[block]].append(
            Call(
                first=first,
                end=end,
                inputs=tuple(entries[place:outputs]),
                outputs=tuple(entries[outputs : outputs + n_outputs]),
            )
        )
        place = outputs + n_outputs
    return dict(found)


def _used_until(calls: Mapping[str, Sequence[Call]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for call in (call for own in calls.values() for call in own):
        for entry in call.inputs:
            found[entry] = max(found.get(entry, 0), call.end)
    return found


def _phase_of_tick(phases: tuple[PhaseSpan, ...], n_ticks: int) -> NDArray[np.int8]:
    codes = np.full(n_ticks + 2, -1, dtype=np.int8)
    for span in phases:
        codes[span.first_tick : span.end_tick] = PHASES.index(span.phase)
    return codes
