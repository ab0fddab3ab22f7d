"""The baseline of a step that fits only with recompute, put together from a run that did fit.

A recompute makes again what keeping would have kept, so a run shows everything that the step without its policy holds:

    recomputed   f ──╮ freed        ┌─ recompute: f again ─┐ backward of f ... freed
    kept         f ──┴──────────────────────────────────────────────────── freed

1. A recompute of a unit repeats its latest call that was not repeated yet. Both make the same tensors in the same
   order; with early stop the recompute makes the first of them only.
2. What a recompute made and backward still found was saved: its twin of forward lives until then. What died before
   backward's first allocation was the frame of the stopped recompute.
3. What recomputes made goes, and so do the generator's state that each checkpoint kept and the copies of running
   statistics that a recompute moves in their stead, made right before it.
4. What only a checkpoint kept, an input that no operation saves, is gone once the last block that was given it returns.

A unit inside another one runs again on its own as well: what that finds, its call in forward would have kept too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from explorer.plan.forecast.block_bytes import with_bytes
from explorer.plan.forecast.changes import stash_bytes
from explorer.plan.forecast.replay import BACKWARD, Replay
from explorer.plan.forecast.unforeseen import no_baseline
from explorer.plan.memory.ledger import Bytes, Mask, array_of
from explorer.record.allocations import ROLES, Allocations, Calls, Phase, PhaseSpan
from explorer.record.base import Column, column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import AllocatorPeaks, Measurement, Samples
from explorer.record.policy import KEEP_ALL, Policy

LOST_SHARE = 0.01
"""Share of the peak: where recomputes made more than that otherwise than forward did, nothing is put together."""
COPY = "aten.clone.default"
BUFFER, SAVED, TEMPORARY = (ROLES.index(role) for role in ("buffer", "saved activation", "temporary"))


def keep_all_from(run: Measurement, graph: ModelGraph | None = None) -> Measurement | None:
    """What the step of `run` would measure with every block kept; its origin is `predicted`, and it has no times.

    `graph` knows which inputs of blocks nobody saves: without it an input that only a checkpoint kept stays.
    None where nothing can be put together: no timeline, a run that was cut short, unknown calls, reentrant
    checkpointing, a unit that saves operators or offloads, or recomputes that do not repeat what forward did.
    """
    policy = run.spec.policy
    if no_baseline(run):
        return None
    if not policy.units:
        return run
    replay, log = Replay.of(run, graph), run.allocations
    if replay is None or log is None:
        return None
    repeats = _repeats(run, replay)
    if repeats is None:
        return None
    lives = _Lives(replay, policy)
    lost = sum(lives.undo(span, window) for span, window in repeats)
    if lost > LOST_SHARE * int(replay.line.max()):
        return None
    named = np.array([bool(op) for op in log.ops], dtype=np.bool_)[array_of(log.op)]
    lives.free_what_checkpoints_kept(~named, stash_bytes=stash_bytes(run, policy))
    return _written(run, log, lives)


def _repeats(run: Measurement, replay: Replay) -> list[tuple[PhaseSpan, tuple[int, int]]] | None:
    """Each recompute with the call that it repeats: what that allocated is born after the first, not after the second.

    None where a unit ran again more often than it ran.
    """
    calls: dict[str, list[tuple[int, int]]] = {}
    for unit in run.spec.policy.units:
        members = [replay.calls.get(fqn, []) for fqn in unit.blocks]
        calls[unit.blocks[0]] = [(together[0].first, together[-1].end) for together in zip(*members)]
    repeats = []
    for span in run.phases:
        if span.phase == "recompute":
            windows = calls.get(span.block, [])
            latest = max((i for i, (_, end) in enumerate(windows) if end < span.first_tick), default=None)
            if latest is None:
                return None
            repeats.append((span, windows.pop(latest)))
    return repeats


class _Lives:
    """Births, deaths and roles of the entries while recomputes are undone one by one."""

    def __init__(self, replay: Replay, policy: Policy) -> None:
        self._replay = replay
        self._members = {unit.blocks[0]: unit.blocks for unit in policy.units}
        self.died, self.role = replay.died.copy(), replay.role.copy()
        self.gone: Mask = np.zeros(len(self.died), dtype=np.bool_)

    def undo(self, span: PhaseSpan, window: tuple[int, int]) -> int:
        """What the recompute made goes; what backward found of it, forward's twin keeps until then.

        Bytes that backward found and forward had not made.
        """
        replay = self._replay
        again = replay.between(span.first_tick - 1, span.end_tick - 1)
        self.gone[again] = True
        self.gone[self._copied_before(span)] = True
        begins = self._next_backward(span.end_tick)
        lost = int(replay.size[again[replay.died[again] > begins]].sum())
        for twin, made in _pairs(replay.size, replay.between(*window), again):
            if replay.died[made] > begins:
                self.died[twin] = max(self.died[twin], replay.died[made])
                self.role[twin] = SAVED
                lost -= int(replay.size[made])
        return lost

    def _copied_before(self, span: PhaseSpan) -> list[int]:
        """Copies of buffers below the unit that runs again, which are the last that was made before it does."""
        replay = self._replay
        own = np.concatenate([replay.below(fqn) for fqn in self._members[span.block]])
        sizes = replay.size[own[replay.role[own] == BUFFER]].tolist()
        copies: list[int] = []
        before = replay.between(0, span.first_tick - 1)
        for entry in before[len(before) - len(sizes) :][::-1].tolist():
            size = int(replay.size[entry])
            if replay.ops[replay.op[entry]] != COPY or size not in sizes:
                break
            sizes.remove(size)
            copies.append(entry)
        return copies

    def _next_backward(self, tick: int) -> int:
        """First birth of backward from `tick` on."""
        births = self._replay.births
        later = births[np.searchsorted(births, tick) :]
        of_backward = later[self._replay.phase[np.minimum(later, len(self._replay.phase) - 1)] == BACKWARD]
        return int(of_backward[0]) if len(of_backward) else int(births[-1])

    def free_what_checkpoints_kept(self, nameless: Mask, *, stash_bytes: int) -> None:
        """The generator's state of each call, which no operator returned, and inputs that no operation saves."""
        replay = self._replay
        if stash_bytes:
            self.gone |= nameless & (replay.size == stash_bytes) & (replay.born > 0)
        for first in self._members:
            given = {entry for call in replay.calls.get(first, []) for entry in call.inputs}
            for entry in given:
                if replay.saved_in.get(entry) == ():
                    self.died[entry] = replay.used_until[entry] + 1
                    self.role[entry] = TEMPORARY


def _pairs(size: Bytes, made: NDArray[np.intp], again: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """What forward made beside what the recompute made, in order of birth; what one of them lacks is passed over."""
    place = 0
    for entry in again:
        here = np.flatnonzero(size[made[place:]] == size[entry])
        if len(here):
            place += int(here[0]) + 1
            yield int(made[place - 1]), int(entry)


def _written(run: Measurement, log: Allocations, lives: _Lives) -> Measurement:
    """The timeline that is left, its ticks counted anew: one for each event."""
    left = ~lives.gone
    born, died = array_of(log.born)[left], lives.died[left]
    happens = np.zeros(log.n_ticks + 2, dtype=np.bool_)
    happens[born] = happens[died] = True
    happens[[0, -1]] = True
    tick = np.cumsum(happens) - 1  # of an old tick, the last event until then
    entry = np.where(left, np.cumsum(left) - 1, -1)
    casts = array_of(log.weight_casts)
    allocations = msgspec.structs.replace(
        log,
        n_ticks=int(tick[-1]) - 1,
        n_bytes=_column(array_of(log.n_bytes)[left]),
        born=_column(tick[born]),
        died=_column(tick[died]),
        role=_column(lives.role[left]),
        block=_column(array_of(log.block)[left]),
        op=_column(array_of(log.op)[left]),
        time_ns=column(),
        calls=_calls(log.calls, tick, entry),
        weight_casts=_column(entry[casts[left[casts]]]),
    )
    kept = msgspec.structs.replace(
        run,
        spec=msgspec.structs.replace(run.spec, policy=KEEP_ALL),
        origin="predicted",
        allocations=allocations,
        phases=_phases(run.phases, tick),
        peaks=AllocatorPeaks(),
        times=None,
        warnings=(),
    )
    once = [
        msgspec.structs.replace(cost, n_recompute=0, recompute_flops=0, skipped_flops=0, recompute=Samples())
        for cost in run.blocks
    ]
    return msgspec.structs.replace(kept, blocks=with_bytes(kept, once))


def _calls(calls: Calls, tick: Bytes, entry: Bytes) -> Calls:
    """The same calls; an entry that went is no longer among what they were given or gave back."""
    n_inputs: list[int] = []
    n_outputs: list[int] = []
    entries: list[int] = []
    place = 0
    numbers = entry[array_of(calls.entries)]
    for n_in, n_out in zip(calls.n_inputs, calls.n_outputs):
        sides = numbers[place : place + n_in], numbers[place + n_in : place + n_in + n_out]
        place += n_in + n_out
        for side, counts in zip(sides, (n_inputs, n_outputs)):
            known = side[side >= 0].tolist()
            counts.append(len(known))
            entries += known
    return msgspec.structs.replace(
        calls,
        first_tick=_column(tick[array_of(calls.first_tick)]),
        end_tick=_column(tick[array_of(calls.end_tick)]),
        n_inputs=column(n_inputs),
        n_outputs=column(n_outputs),
        entries=column(entries),
    )


def _phases(spans: Sequence[PhaseSpan], tick: Bytes) -> tuple[PhaseSpan, ...]:
    """Without recomputes: what is left of one belongs to the backward around it."""
    phases: list[PhaseSpan] = []
    for span in spans:
        phase: Phase = "backward" if span.phase == "recompute" else span.phase
        first = int(tick[span.first_tick - 1]) + 1 if span.first_tick else 0
        end = int(tick[span.end_tick - 1]) + 1
        if phases and phases[-1].phase == phase:
            first = phases.pop().first_tick
        if first < end:
            phases.append(PhaseSpan(phase=phase, block="", first_tick=first, end_tick=end))
    return tuple(phases)


def _column(values: Bytes) -> Column:
    return Column("q", np.ascontiguousarray(values, dtype=np.int64).tobytes())
