"""Baselines that were not measured: a step with everything kept, and a step at another size.

**Everything kept** (`keep_all_from`) is derived from a run with recompute, for a step that fits only with recompute.
A recompute makes the tensors again that keeping would have saved. So the run shows all tensors of the keep-all step:

    recomputed   f ──╮ freed        ┌─ recompute: f again ─┐ backward of f ... freed
    kept         f ──┴──────────────────────────────────────────────────── freed

1. A recompute of a unit repeats its latest call that was not repeated yet. Both make the same tensors in the same
   order; with early stop the recompute makes only the first of the tensors.
2. A recomputed tensor that is alive when backward begins was saved: its twin in forward lives as long. A recomputed
   tensor that died before backward's first allocation belonged to the frame of the stopped recompute.
3. Recomputed tensors are removed. The generator state that each checkpoint kept is removed too, and so are the copies
   of running statistics, which are made right before a recompute.
4. An input that no operation saves, kept only by a checkpoint, dies when the last block that uses it returns. It lives
   longer if the code of forward was seen to hold it longer.

A unit inside another unit runs again separately too: the saved tensors of this rerun extend its call in forward.

**Another size** (`at_size`) is derived from two or three runs at small sizes. As long as no shape depends on the
data, these runs make the same tensors in the same order. The bytes of each tensor are then a polynomial of the size: of
degree one for a batch, of degree two for a length where attention is not fused. The peak is the highest point of the
timeline with the tensors' sizes there. Where the runs differ event by event, `at_size` takes a polynomial through their
peaks, and `Sized.event_by_event` is False."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import attrgetter

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from explorer.errors import BadInput
from explorer.plan.memory.ledger import Bytes, Mask, alive, array_of, ints, peak_tick
from explorer.plan.memory.next_step import next_step
from explorer.plan.names import lineage, listed
from explorer.plan.predict.calls import stash_bytes
from explorer.plan.predict.not_predicted import no_baseline
from explorer.plan.predict.replay import BACKWARD, Replay, graph_under
from explorer.record.allocations import ROLES, Allocations, Calls, Phase, PhaseSpan, Saves
from explorer.record.base import Column, Record, column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import AllocatorPeaks, MeasuredBlock, Measurement, Samples
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

LOST_SHARE = 0.01
"""Share of the peak. If recomputes differ from forward by more bytes than this share, there is no baseline."""
COPY = "aten.clone.default"
BUFFER, SAVED, TEMPORARY = (ROLES.index(role) for role in ("buffer", "saved activation", "temporary"))


def keep_all_from(run: Measurement, graph: ModelGraph | None = None) -> Measurement | None:
    """The measurement of `run` with every block kept; its origin is `predicted`, and it has no times.

    State that a recorded step made is there from the start, see plan/memory/next_step.py.
    `graph` knows which inputs of blocks no operation saves. Without it an input that only a checkpoint kept stays.
    None if the run has no timeline, was cut short, or its calls are unknown. None also for reentrant checkpointing,
    units that save operators or offload, and recomputes that do not repeat forward.
    """
    policy = run.spec.policy
    if no_baseline(run):
        return None
    run = next_step(run)
    if not policy.units:
        return run
    replay, log = Replay.of(run, graph_under(run, graph)), run.allocations
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
    """Each recompute with the window of the call that it repeats: last tick before the call, and last tick of it.

    None if a unit ran again more often than it ran.
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
        """Removes the tensors of a recompute, and lets their twins in forward live as long as backward needs them.

        Returns bytes that backward used and that have no twin in forward.
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
        """Copies of buffers below the recomputed unit: the last tensors made before the recompute."""
        replay = self._replay
        entries = np.concatenate([replay.below(fqn) for fqn in self._members[span.block]])
        sizes = replay.size[entries[replay.role[entries] == BUFFER]].tolist()
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
        """Tick of the first birth in backward at or after `tick`."""
        births = self._replay.births
        later = births[np.searchsorted(births, tick) :]
        of_backward = later[self._replay.phase[np.minimum(later, len(self._replay.phase) - 1)] == BACKWARD]
        return int(of_backward[0]) if len(of_backward) else int(births[-1])

    def free_what_checkpoints_kept(self, nameless: Mask, *, stash_bytes: int) -> None:
        """Removes the generator state of each call, which no operator returned, and ends inputs that are not saved."""
        replay = self._replay
        if stash_bytes:
            self.gone |= nameless & (replay.size == stash_bytes) & (replay.born > 0)
        for first in self._members:
            inputs = {entry for call in replay.calls.get(first, []) for entry in call.inputs}
            for entry in inputs:
                if replay.saved_in.get(entry) == ():
                    self.died[entry] = max(replay.used_until[entry] + 1, replay.released[entry])
                    self.role[entry] = TEMPORARY


def _pairs(size: Bytes, made: NDArray[np.intp], again: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Pairs of an entry of forward and its recomputed twin, in order of birth. Entries without a twin are skipped."""
    place = 0
    for entry in again:
        here = np.flatnonzero(size[made[place:]] == size[entry])
        if len(here):
            place += int(here[0]) + 1
            yield int(made[place - 1]), int(entry)


def _written(run: Measurement, log: Allocations, lives: _Lives) -> Measurement:
    """The measurement with the remaining timeline, renumbered to one tick for each event."""
    left = ~lives.gone
    born, died = array_of(log.born)[left], lives.died[left]
    happens = np.zeros(log.n_ticks + 2, dtype=np.bool_)
    happens[born] = happens[died] = True
    happens[[0, -1]] = True
    tick = np.cumsum(happens) - 1  # of an old tick, the last event until then
    entry = np.where(left, np.cumsum(left) - 1, -1)
    casts, released = array_of(log.weight_casts), array_of(log.released)
    allocations = replace(
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
        released=_column(np.where(released > 0, tick[released - 1] + 1, 0)[left]) if len(released) else column(),
        dtype=_column(array_of(log.dtype)[left]) if log.dtype else column(),
        stream=_column(array_of(log.stream)[left]) if log.stream else column(),
    )
    keep_all = replace(
        without_readings(run),
        spec=replace(run.spec, policy=KEEP_ALL),
        allocations=allocations,
        phases=_phases(run.phases, tick),
        warnings=(),
    )
    once = [
        replace(cost, n_recompute=0, recompute_flops=0, skipped_flops=0, recompute=Samples()) for cost in run.blocks
    ]
    return replace(keep_all, blocks=with_bytes(keep_all, once))


def _calls(calls: Calls, tick: Bytes, entry: Bytes) -> Calls:
    """The calls without the removed entries among their inputs and outputs."""
    n_inputs: list[int] = []
    n_outputs: list[int] = []
    entries: list[int] = []
    place = 0
    numbers = entry[array_of(calls.entries)]
    for n_in, n_out in zip(calls.n_inputs, calls.n_outputs):
        sides = numbers[place : place + n_in], numbers[place + n_in : place + n_in + n_out]
        place += n_in + n_out
        for side, counts in zip(sides, (n_inputs, n_outputs)):
            remaining = side[side >= 0].tolist()
            counts.append(len(remaining))
            entries += remaining
    return replace(
        calls,
        first_tick=_column(tick[array_of(calls.first_tick)]),
        end_tick=_column(tick[array_of(calls.end_tick)]),
        n_inputs=column(n_inputs),
        n_outputs=column(n_outputs),
        entries=column(entries),
    )


def _phases(spans: Sequence[PhaseSpan], tick: Bytes) -> tuple[PhaseSpan, ...]:
    """The phases without recomputes. Remaining ticks of a recompute belong to the backward around it."""
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


def without_readings(run: Measurement) -> Measurement:
    """`run` as the begin of a predicted one: without the allocator's counters, times and card."""
    return replace(run, origin="predicted", peaks=AllocatorPeaks(), times=None, card=None)


def with_bytes(run: Measurement, costs: Sequence[MeasuredBlock]) -> tuple[MeasuredBlock, ...]:
    """`costs` with the bytes that the timeline of `run` holds for each block, at the end of forward and at the peak."""
    log, border = run.allocations, run.forward_end_tick
    assert log is not None and border is not None, "a timeline that is put together has the end of forward"
    saved = array_of(log.role) == SAVED
    nothing = np.zeros(len(saved), dtype=np.bool_)
    at_border, at_peak = nothing.copy(), nothing.copy()
    at_border[alive(log, border)] = at_peak[alive(log, peak_tick(log))] = True
    saved_bytes, most = _by_fqn(log, at_border & saved), _by_fqn(log, at_peak)
    return tuple(
        replace(cost, saved_after_forward_bytes=saved_bytes.get(cost.fqn, 0), at_peak_bytes=most.get(cost.fqn, 0))
        for cost in costs
    )


def _by_fqn(log: Allocations, which: Mask) -> dict[str, int]:
    n_bytes_of: Bytes = np.zeros(len(log.blocks), dtype=np.int64)
    np.add.at(n_bytes_of, array_of(log.block)[which], array_of(log.n_bytes)[which])
    by_fqn: dict[str, int] = {}
    for fqn, n_bytes in zip(log.blocks, n_bytes_of.tolist()):
        for block in lineage(fqn):
            by_fqn[block] = by_fqn.get(block, 0) + n_bytes
    return by_fqn


_SAME = ("n_ticks", "born", "died", "role", "block", "op", "blocks", "ops", "calls", "weight_casts")
"""What is equal in runs that made and freed the same tensors in the same order."""
_FLOPS = ("forward_flops", "recompute_flops", "backward_flops", "skipped_flops")


class Sized(Record):
    """The predicted memory of a step at one size."""

    size: int
    step_peak_bytes: int
    event_by_event: bool
    """True: the timeline is known to the byte. False: a polynomial through the measured peaks, which is rougher."""
    measurement: Measurement | None
    """The whole timeline if the runs agree event by event: any policy can be forecast from it."""


def at_size(runs: Mapping[int, Measurement], size: int, spec: RunSpec) -> Sized:
    """The step of `spec` at `size`, from finished runs by their sizes: two for a batch, three for a length.

    Raises BadInput for fewer than two runs, runs without a timeline, and runs whose memory does not depend on the size.
    """
    sizes = sorted(runs)
    logs = [runs[measured].allocations for measured in sizes]
    complete_logs = [log for log in logs if log is not None]
    if len(sizes) < 2 or len(complete_logs) < len(sizes) or any(run.failure is not None for run in runs.values()):
        raise BadInput(
            f"A step at size {size} is predicted from two finished runs or more, found {len(complete_logs)}.",
            hint="Measure the step at two small sizes first, such as batch 2 and batch 4.",
        )
    if all(log.n_bytes == complete_logs[0].n_bytes for log in complete_logs):
        raise BadInput(
            f"The step holds the same bytes at sizes {listed([str(measured) for measured in sizes])}: "
            "its batch does not depend on the size.",
            hint="Vary an argument that the factory makes its batch from.",
        )
    # Lagrange polynomials, exact.
    weights = []
    for node in sizes:
        factors = [Fraction(size - other, node - other) for other in sizes if other != node]
        weights.append(math.prod(factors, start=Fraction(1)))
    if any(getattr(log, name) != getattr(complete_logs[0], name) for log in complete_logs for name in _SAME):
        peaks = [max(log.held_bytes) for log in complete_logs]
        return Sized(size=size, step_peak_bytes=_at(weights, peaks), event_by_event=False, measurement=None)
    log = replace(complete_logs[0], n_bytes=_sizes_at(weights, complete_logs), time_ns=column(), saves=Saves())
    measurement = _told([runs[measured] for measured in sizes], weights, log, spec)
    return Sized(size=size, step_peak_bytes=max(log.held_bytes), event_by_event=True, measurement=measurement)


def largest(fits: Callable[[int], bool], *, most: int = 2**20) -> int:
    """The largest size up to `most` that `fits`, 0: not even 1; `fits` is true up to some size and false behind it."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at(weights: list[Fraction], values: list[int]) -> int:
    return max(0, round(sum(weight * value for weight, value in zip(weights, values))))


def _sizes_at(weights: list[Fraction], logs: list[Allocations]) -> Column:
    """Bytes of each entry at the requested size. Entries of equal sizes in every run share one sum."""
    rows = np.stack([array_of(log.n_bytes) for log in logs])
    kinds, which = np.unique(rows, axis=1, return_inverse=True)
    there = ints([_at(weights, kind.tolist()) for kind in kinds.T])
    return _column(there[which.reshape(-1)])


def _told(runs: list[Measurement], weights: list[Fraction], log: Allocations, spec: RunSpec) -> Measurement:
    def counted(rows: tuple[MeasuredBlock, ...]) -> MeasuredBlock:
        flops = {name: _at(weights, [*map(attrgetter(name), rows)]) for name in _FLOPS}
        return replace(rows[0], forward=Samples(), recompute=Samples(), **flops)

    base = without_readings(runs[0])
    predicted = replace(base, spec=spec, allocations=log, loss=None, warnings=())
    costs = list(map(counted, zip(*(run.blocks for run in runs))))
    return replace(predicted, blocks=with_bytes(predicted, costs))
