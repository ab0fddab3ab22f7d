"""The marginal price of every block: MiB of peak for a percent of recompute, if it were toggled now.

A measured timeline is replayed with one block changed. Bytes that the block saves leave the timeline between the end
of its forward and the start of its backward, come back there, and running forward again needs its scratch once more:

    held  ________                      ________
          forward |____________________|        kept -> recompute: the shaded bytes are gone,
          of b    fe ////////////////// rb      the peak may now be at rb (the recompute itself)

The other way round, what the measured recompute left behind is held from the end of forward on. A block that is not
alive at the peak costs FLOPs and moves no peak at all: that is what the price shows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.series import Bytes, array_of, held, is_within
from explorer.record.measurement import PHASES, ROLES, Allocations, BlockBill, Measurement, PhaseSpan
from explorer.record.policy import Unit
from explorer.record.price import Price

FORWARD, RECOMPUTE, BACKWARD = (PHASES.index(phase) for phase in ("forward", "recompute", "backward"))
SAVED = ROLES.index("saved activation")


def prices(measurement: Measurement, blocks: Iterable[str] | None = None) -> tuple[Price, ...]:
    """Prices of the kept `blocks` (by default every block that saves something) and of every recomputed unit.

    Blocks above, below or inside a recomputed unit have no price of their own: toggling one changes the unit. Empty
    where no timeline was recorded.

    Predicted. A checkpoint also keeps its input: where nobody else held that (a cell that copies it), the real peak is
    higher by the input's bytes, which no timeline shows.
    """
    log = measurement.allocations
    if log is None or not measurement.phases or not len(log.n_bytes):
        return ()
    replay = Replay.of(measurement, log)
    units = measurement.spec.policy.units
    named = [fqn for unit in units for fqn in unit.blocks]
    wanted = [bill.fqn for bill in measurement.blocks if bill.saved_after_forward_bytes] if blocks is None else blocks
    found = [_if_kept(measurement, replay, unit) for unit in units if not _nested(unit, named)]
    found += [
        _if_recomputed(measurement, replay, fqn)
        for fqn in dict.fromkeys(wanted)
        if fqn and not any(is_within(fqn, other) or is_within(other, fqn) for other in named)
    ]
    return tuple(price for price in found if price is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A timeline sorted so that everything below one fqn lies side by side."""

    line: Bytes
    phase: NDArray[np.int8]
    """Index into PHASES of each tick; -1 outside all spans."""
    keys: list[tuple[str, ...]]
    starts: NDArray[np.intp]
    """First entry of each key, and the number of entries at the end."""
    size: Bytes
    born: Bytes
    died: Bytes
    role: Bytes
    kind: Bytes
    """One number for each pair of block and operator."""
    births: Bytes
    """Ticks at which anything is born, ascending, and the tick behind the last."""
    early_stop: bool

    @classmethod
    def of(cls, measurement: Measurement, log: Allocations) -> Replay:
        """Sorts once; every price reads it."""
        order = sorted(range(len(log.blocks)), key=lambda i: tuple(log.blocks[i].split(".")))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        ranks = rank[array_of(log.block)]
        by_block = np.lexsort((array_of(log.born), ranks))
        kinds = array_of(log.block) * len(log.ops) + array_of(log.op)
        columns = (array_of(log.n_bytes), array_of(log.born), array_of(log.died), array_of(log.role), kinds)
        size, born, died, role, kind = (values[by_block] for values in columns)
        return cls(
            line=held(log),
            phase=_phase_of_tick(measurement.phases, log.n_ticks),
            keys=[tuple(log.blocks[i].split(".")) for i in order],
            starts=np.searchsorted(ranks[by_block], np.arange(len(order) + 1)),
            size=size,
            born=born,
            died=died,
            role=role,
            kind=kind,
            births=np.append(np.sort(born), log.n_ticks + 1),
            early_stop=measurement.spec.policy.early_stop,
        )

    def below(self, fqn: str) -> slice:
        """Entries of `fqn` and of everything below it."""
        parts = tuple(fqn.split("."))
        end = (*parts[:-1], parts[-1] + "\0")
        return slice(int(self.starts[bisect_left(self.keys, parts)]), int(self.starts[bisect_left(self.keys, end)]))

    def peak_without(self, stays: Sequence[Stay]) -> int:
        """The peak once the bytes of `stays` are gone, and each comes back by running forward again."""
        bounds, offsets = _offsets([(stay.first, stay.end, -stay.n_bytes) for stay in stays], len(self.line))
        peak = int((np.maximum.reduceat(self.line, bounds) + offsets).max())
        at = np.searchsorted(bounds, [max(stay.end - 1, 0) for stay in stays], side="right") - 1
        for stay, place in zip(stays, at):
            gone = offsets[place] if stay.end > stay.first else -stay.n_bytes
            peak = max(peak, int(self.line[stay.end - 1] + gone) + stay.again_bytes)
        return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Bytes that one call of a block leaves behind for its backward."""

    first: int
    """First tick at which they would be gone."""
    end: int
    """Tick at which backward of the call begins."""
    n_bytes: int
    again_bytes: int
    """Most that running forward again holds at once."""


def _if_recomputed(measurement: Measurement, replay: Replay, fqn: str) -> Price | None:
    stays = stays_of(measurement, replay, fqn)
    return _price(measurement, replay, (fqn,), stays, measurement.by_fqn[fqn]) if stays else None


def stays_of(measurement: Measurement, replay: Replay, fqn: str) -> list[Stay]:
    """What each call of the kept block `fqn` leaves behind for its own backward, and recomputing would free."""
    bill = measurement.by_fqn.get(fqn)
    here = replay.below(fqn)
    size, born, died, role = (values[here] for values in (replay.size, replay.born, replay.died, replay.role))
    forward = (replay.phase[born] == FORWARD) & (born > 0)
    saved = np.flatnonzero(
        forward & (role == SAVED) & (replay.phase[np.minimum(died, len(replay.phase) - 1)] != FORWARD)
    )
    if bill is None or not len(saved):
        return []
    saved = saved[np.argsort(born[saved], kind="stable")]
    calls = _calls(saved, replay.kind[here][saved], max(bill.n_forward, 1))
    later = born[(replay.phase[born] >= RECOMPUTE) & (born > 0)]
    stays: list[Stay] = []
    before = 0
    output = int(np.where(forward, born, 0).argmax())
    for call in calls:
        if len(calls) == 1:
            inside, begins = _own(call[call != output], died, later[later > born[call[-1]]])
        else:
            inside = call[:-1] if len(call) > 1 else call
            begins = int(died[inside].min())
        if len(inside):
            last = int(born[inside].max())
            until = last if replay.early_stop else int(born[call[-1]])
            again = np.flatnonzero(forward & (born > before) & (born <= until))
            peak = _most_at_once(size[again], born[again], died[again])
            stays.append(Stay(first=last + 1, end=begins, n_bytes=int(size[inside].sum()), again_bytes=peak))
        before = int(born[call].max())
    return stays


def _calls(saved: NDArray[np.intp], kind: Bytes, n_calls: int) -> list[NDArray[np.intp]]:
    """`saved`, in order of birth, call by call. The record does not name the calls: what each saves once begins one."""
    if n_calls == 1:
        return [saved]
    _, first, counts = np.unique(kind, return_index=True, return_counts=True)
    once = first[counts == n_calls]
    if not len(once):
        return [call for call in np.array_split(saved, n_calls) if len(call)]
    starts = np.flatnonzero(kind == kind[once.min()])
    return np.split(saved, starts[1:])


def _own(saved: NDArray[np.intp], died: Bytes, backward_births: Bytes) -> tuple[NDArray[np.intp], int]:
    """What only the block itself still holds when its backward begins, and the tick of that.

    What dies earlier is held by the blocks behind it, and so is the block's output, which its own graph may hold as
    well (a ReLU): recompute would free neither.
    """
    if not len(saved):
        return saved, 0
    begins = int(backward_births.min()) if len(backward_births) else int(died[saved].min())
    return saved[died[saved] >= begins], begins


def _most_at_once(size: Bytes, born: Bytes, died: Bytes) -> int:
    """Peak of these entries alone, over the ticks at which one of them is born."""
    if not len(size):
        return 0
    births = np.sort(born)
    delta = np.zeros(len(births) + 1, dtype=np.int64)
    np.add.at(delta, np.searchsorted(births, born), size)
    np.subtract.at(delta, np.searchsorted(births, died), size)
    return int(np.cumsum(delta[:-1]).max())


def _price(
    measurement: Measurement, replay: Replay, blocks: tuple[str, ...], stays: Sequence[Stay], bill: BlockBill
) -> Price:
    peak = replay.peak_without(stays)
    total = measurement.total_flops
    return Price(
        blocks=blocks,
        toggle="recompute",
        peak_bytes=peak,
        peak_change_bytes=peak - int(replay.line.max()),
        share_of_step_flops=bill.forward_flops / total if total else None,
    )


def _if_kept(measurement: Measurement, replay: Replay, unit: Unit) -> Price | None:
    bills = [measurement.by_fqn[fqn] for fqn in unit.blocks if fqn in measurement.by_fqn]
    spans = [
        span
        for span in measurement.phases
        if span.phase == "recompute" and any(is_within(span.block, fqn) for fqn in unit.blocks)
    ]
    if not spans or len(bills) < len(unit.blocks):
        return None
    ends = _forward_ends(replay, unit.blocks)
    line, changes = replay.line.copy(), []
    for span in spans:
        end = min(span.end_tick, len(line))
        # What is freed before backward allocates anything was made again for nothing, such as the block's output.
        begins = int(replay.births[np.searchsorted(replay.births, end)])
        inside = (replay.born >= span.first_tick) & (replay.born < end) & (replay.died >= begins)
        left = int(replay.size[inside].sum())
        before = ends[ends < span.first_tick]
        changes.append((int(before.max()) + 1 if len(before) else span.first_tick, span.first_tick, left))
        line[span.first_tick : end] = replay.line[span.first_tick - 1] + left
    bounds, offsets = _offsets(changes, len(line))
    peak = int((np.maximum.reduceat(line, bounds) + offsets).max())
    total = measurement.total_flops
    return Price(
        blocks=unit.blocks,
        toggle="keep",
        peak_bytes=peak,
        peak_change_bytes=peak - int(replay.line.max()),
        share_of_step_flops=sum(bill.recompute_flops for bill in bills) / total if total else None,
    )


def _offsets(changes: Sequence[tuple[int, int, int]], length: int) -> tuple[NDArray[np.intp], Bytes]:
    """Borders of the stretches with one offset, and those offsets, for changes (first tick, end tick, bytes)."""
    whole = [(first, end, n_bytes) for first, end, n_bytes in changes if first < end]
    bounds = np.unique([0, *(tick for first, end, _ in whole for tick in (first, end) if tick < length)])
    steps = np.zeros(len(bounds), dtype=np.int64)
    for first, end, n_bytes in whole:
        steps[np.searchsorted(bounds, first)] += n_bytes
        if end < length:
            steps[np.searchsorted(bounds, end)] -= n_bytes
    return bounds.astype(np.intp), np.cumsum(steps)


def _forward_ends(replay: Replay, fqns: Sequence[str]) -> Bytes:
    """Ticks of the unit's own forward events: births, and frees before another block allocates."""
    here = np.concatenate([np.arange(len(replay.born))[replay.below(fqn)] for fqn in fqns])
    born, died = replay.born[here], replay.died[here]
    forward = (replay.phase[born] == FORWARD) & (born > 0)
    births = np.sort(born[forward])
    # Of each free: the unit's last birth before it, and the next birth of anyone after that.
    last = births[np.maximum(np.searchsorted(births, died[forward]) - 1, 0)]
    following = replay.births[np.searchsorted(replay.births, last, side="right")]
    frees = died[forward][died[forward] < following]
    return np.concatenate([births, frees])


def _phase_of_tick(phases: tuple[PhaseSpan, ...], n_ticks: int) -> NDArray[np.int8]:
    codes = np.full(n_ticks + 2, -1, dtype=np.int8)
    for span in phases:
        codes[span.first_tick : span.end_tick] = PHASES.index(span.phase)
    return codes


def _nested(unit: Unit, named: Sequence[str]) -> bool:
    """Whether another unit lies above or below this one."""
    others = [fqn for fqn in named if fqn not in unit.blocks]
    return any(is_within(fqn, other) or is_within(other, fqn) for fqn in unit.blocks for other in others)
