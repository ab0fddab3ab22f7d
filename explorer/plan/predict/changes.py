"""Changes of a measured timeline if some units are recomputed: freed bytes, bytes held longer, bytes made twice.

    held  ________                      ________
          forward |____________________|        kept -> recomputed: the shaded bytes are gone,
          of b    fe ////////////////// rb      the peak may now be at rb (the recompute itself)

calls.py has the rules for one call; this file combines calls. An input that a checkpoint keeps stays alive although
another unit would free it (a skip from one block to another). Each call keeps the state of torch's generator on the
CPU. Source: https://docs.pytorch.org/docs/stable/checkpoint.html.
Test against real runs: tests/engine/bench/test_predictions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes, Mask
from explorer.plan.predict.nesting import Nest, again_bytes, entries_restored_with
from explorer.plan.predict.replay import Replay
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy

RNG_STATE_BYTES = 5056
"""State of torch's CPU generator (torch.get_rng_state), which every checkpoint call keeps; a GPU's lies on the CPU."""
Changes = NDArray[np.int64]
"""First ticks, end ticks, and bytes more than measured between them."""


def stash_bytes(measurement: Measurement, policy: Policy) -> int:
    """Bytes that every checkpoint call keeps on the measured device for its generator."""
    return RNG_STATE_BYTES if policy.preserve_rng_state and measurement.environment.device == "cpu" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Changes by recomputing: the timeline, and the bytes saved at the end of forward."""

    changes: Changes
    saved_bytes: int
    """Bytes saved at the end of forward minus the measured ones: negative if entries are freed."""
    away: Mask
    """Whether each entry is freed by the end of forward."""
    gone: tuple[Bytes, Bytes, Bytes]
    """Entry, first tick and end tick of its absence, for entries that are absent once."""
    lives: tuple[Bytes, Bytes, Bytes]
    """Entry, first tick and end tick of each stretch in which any other entry of the calls is held."""
    owner: Bytes
    """The innermost call that makes each entry again, or -1."""


def changes_of(replay: Replay, nest: Nest, border: int | None, *, stash_bytes: int) -> Simulated:
    """Changes if all calls of `nest` are recomputed. Tick `border` is the end of forward, None if not reached."""
    own, given = _of_calls(replay, nest), _given(replay, nest)
    born, died, size = replay.born, replay.died, replay.size
    is_given = np.zeros(len(size), dtype=bool)
    is_given[given.entry] = True
    # Most entries are freed and restored once. An entry that is an input too may be kept meanwhile, or for longer.
    gone, mixed = _single_gaps(replay, own, is_given)
    touched = np.flatnonzero(mixed | is_given)
    again = mixed[own.entry]
    lives = _merged(
        np.concatenate((touched, own.entry[again], given.entry)),
        np.concatenate((born[touched], own.back[again], given.back)),
        np.concatenate((np.where(mixed, own.first_leave, died)[touched], died[own.entry[again]], given.leave)),
        len(replay.line) + 2,
    )
    left = (gone[1], gone[2], -size[gone[0]])
    measured = (born[touched], died[touched], -size[touched])
    simulated = (lives[1], lives[2], size[lives[0]])
    copies = [copy for call in nest.calls for copy in call.copies]
    stashes = [(call.first, call.ends, stash_bytes) for call in nest.calls]
    stashed = np.array([*stashes, *copies], dtype=np.int64).reshape(-1, 3).T
    saved, away = 0, np.zeros(len(replay.size), dtype=bool)
    if border is not None:
        kept = np.zeros(len(replay.size), dtype=bool)
        kept[given.entry[(given.back <= border) & (border < given.leave)]] = True
        # An entry freed right after the last event of forward counts as freed at the end of forward.
        away[own.entry[(own.leave <= border + 1) & (border < own.back)]] = True
        away &= ~kept
        longer = int(replay.size[kept & (replay.died <= border)].sum())
        stash = sum(size for first, end, size in stashes if first <= border < end)
        saved = longer + stash - int(replay.size[away].sum())
    parts = (left, measured, simulated, stashed)
    changes = np.empty((3, sum(len(part[0]) for part in parts)), dtype=np.int64)
    for row, columns in zip(changes, zip(*parts)):
        np.concatenate(columns, out=row)
    return Simulated(changes=changes, saved_bytes=saved, away=away, gone=gone, lives=lives, owner=own.owner)


def _single_gaps(replay: Replay, own: _Absent, is_given: Mask) -> tuple[tuple[Bytes, Bytes, Bytes], Mask]:
    """Entries with a single absence (entry, first tick, end tick), and a mask of the other absent entries."""
    born, died = replay.born[own.entry], replay.died[own.entry]
    plain = ~is_given[own.entry] & (born <= own.leave) & (own.leave <= died) & (own.back <= died)
    mixed = np.zeros(len(is_given), dtype=bool)
    mixed[own.entry[~plain]] = True
    some = plain & (own.leave < own.back)
    return (own.entry[some], own.leave[some], own.back[some]), mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absent:
    """Entries that are absent from tick `leave` to tick `back`."""

    entry: Bytes
    leave: Bytes
    back: Bytes
    owner: Bytes
    """The innermost call that makes an entry again, or -1."""
    first_leave: Bytes
    """The tick at which the first call frees each entry of the timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retained:
    """Entries that are kept from tick `back` to tick `leave`."""

    entry: Bytes
    leave: Bytes
    back: Bytes


def _of_calls(replay: Replay, nest: Nest) -> _Absent:
    """Entries that calls make again. The first call to free an entry decides `leave`, the innermost call `back`."""
    calls = nest.calls
    entries, leaves = joined([call.entries for call in calls]), joined([call.leaves for call in calls])
    owner = np.full(len(replay.size), -1, dtype=np.int64)
    n_entries = [len(call.entries) for call in calls]
    owner[entries] = np.repeat(np.arange(len(calls)), n_entries)  # inner calls come last
    leave = np.full(len(replay.size), np.iinfo(np.int64).max)
    np.minimum.at(leave, entries, leaves)
    mine = np.flatnonzero(owner >= 0)
    back = np.zeros(len(replay.size), dtype=np.int64)
    back[entries] = np.repeat([call.begins for call in calls], n_entries)
    return _Absent(entry=mine, leave=leave[mine], back=back[mine], owner=owner, first_leave=leave)


def _given(replay: Replay, nest: Nest) -> _Retained:
    """Inputs that checkpoints keep: each until backward of its call has ended.

    A call inside another call keeps its inputs from the rerun of the outer call until its own rerun.
    """
    inputs: list[int] = []
    since: list[int] = []
    until: list[int] = []
    for call, parent in zip(nest.calls, nest.parent):
        inputs += call.inputs
        since += [nest.calls[parent].begins if parent >= 0 else 0] * len(call.inputs)
        until += [call.begins if parent >= 0 else call.ends] * len(call.inputs)
        for one, first, end in call.held:
            inputs.append(one)
            since.append(first)
            until.append(end)
    entry, leave, back = (np.array(column, dtype=np.int64) for column in (inputs, until, since))
    return _Retained(entry=entry, leave=leave, back=np.maximum(back, replay.born[entry]))


def _merged(entry: Bytes, first: Bytes, end: Bytes, length: int) -> tuple[Bytes, Bytes, Bytes]:
    """The stretches, with touching or overlapping stretches of an entry merged."""
    some = first < end
    entry, first, end = entry[some], first[some], np.minimum(end[some], length - 1)
    order = np.argsort(entry * length + first, kind="stable")
    start, stop = (entry * length + first)[order], np.maximum.accumulate((entry * length + end)[order])
    new = np.flatnonzero(np.append(True, start[1:] > stop[:-1])) if len(start) else np.zeros(0, dtype=np.intp)
    last = np.append(new[1:], len(start)) - 1 if len(new) else new
    return entry[order][new], start[new] % length, stop[last] % length


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


def peak_with(replay: Replay, simulated: Simulated, nest: Nest, *, stash_bytes: int) -> int:
    """The peak of the changed line, reruns included."""
    stretches = offsets_of(simulated.changes, len(replay.line))
    peak = int((np.maximum.reduceat(replay.line, stretches[0]) + stretches[1]).max())
    return max([peak, *(most for _, most in reruns(replay, simulated, nest, stretches, stash_bytes=stash_bytes))])


def line_with(replay: Replay, simulated: Simulated, nest: Nest, *, stash_bytes: int) -> Bytes:
    """The changed line. The peak of each rerun stands at the event before the backward of its call."""
    bounds, offsets = offsets_of(simulated.changes, len(replay.line))
    line = replay.line + np.repeat(offsets, np.diff(np.append(bounds, len(replay.line))))
    for tick, most in reruns(replay, simulated, nest, (bounds, offsets), stash_bytes=stash_bytes):
        line[tick] = max(line[tick], most)
    return line


def reruns(
    replay: Replay, simulated: Simulated, nest: Nest, stretches: tuple[NDArray[np.intp], Bytes] | None = None, *,
    stash_bytes: int,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The event before each rerun, and the most bytes held during the rerun; `stretches` come from offsets_of."""
    bounds, offsets = stretches or offsets_of(simulated.changes, len(replay.line))
    before = [max(call.begins - 1, 0) for call in nest.calls]
    places = np.searchsorted(bounds, before, side="right") - 1
    for i, (call, tick, place) in enumerate(zip(nest.calls, before, places)):
        base = int(replay.line[tick] + offsets[place]) - call.late_bytes
        if nest.parent[i] >= 0:
            base += _back_at(replay, simulated, entries_restored_with(nest, i, simulated.owner), tick)
        # During the rerun the checkpoint also keeps the present state of the generator.
        yield tick, base + again_bytes(replay, nest, i, stash_bytes=stash_bytes) + stash_bytes


def held_at(replay: Replay, simulated: Simulated, tick: int) -> Mask:
    """Mask of the entries held at `tick`, without the entries of a rerun."""
    held = (replay.born <= tick) & (tick < replay.died)
    entry, first, end = simulated.gone
    held[entry[(first <= tick) & (tick < end)]] = False
    entry, first, end = simulated.lives
    held[entry] = False
    held[entry[(first <= tick) & (tick < end)]] = True
    return held


def _back_at(replay: Replay, simulated: Simulated, entries: Bytes, tick: int) -> int:
    """Bytes of `entries` that are not held at `tick`."""
    entry, first, end = simulated.gone
    missing = np.zeros(len(replay.size), dtype=bool)
    missing[entry] = (first <= tick) & (tick < end) | (tick < replay.born[entry]) | (replay.died[entry] <= tick)
    entry, first, end = simulated.lives
    missing[entry] = True
    missing[entry[(first <= tick) & (tick < end)]] = False
    return int(replay.size[entries[missing[entries]]].sum())
