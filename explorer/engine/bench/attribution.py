"""Role and block of each byte of a step, the cost of each block, and when the code of forward releases its tensors.

The problem. Two instruments watch the step, and each knows half. The allocator sees every byte come and go, inside
kernels too, but not the purpose of a byte. The tracker knows block, operator and role of each storage, but it does not
see every storage.

The idea. The timeline consists of the allocator's blocks alone, so its total is right by construction. The tracker
only adds names to the blocks. A block without a name is shown as "unattributed". A workspace of cuBLAS has no storage
either: its size and its lifetime name it.

    allocator   pointer p   |alloc ........................ free|      |alloc .. free|
    tracker     storage s        ^ returned by mm, block 3                            (no storage: inside a kernel)
    entry                   p: temporary, block 3, mm                  p: unattributed, block and phase by time

The mechanism (`attribute`; steps 1 to 4 in timeline.py).
1. Cut the record to the step. The recording begins earlier; events before the step go into the base.
2. Join: a storage lies in the block that has its pointer and size and was allocated last before the storage was seen.
   An address is handed out many times in a step, so the order in time decides, with a little slack for two clocks.
3. Memory from before the step is an entry too, born at tick 0. CUDA's allocator also knows its further bytes.
4. Ticks are numbered over allocations and deaths alike: only events that change the total are on the time axis.
5. Role, block and operator come from the storage, or else from the operator that ran at the allocation. An entry
   without a name that outlives its forward is kept for backward: the generator's state that a checkpoint stashes.

Releases. In a step autograd holds the saved tensors until backward, so its timeline cannot show when the code drops
them. A checkpoint runs its blocks without autograd: they free their tensors at just these moments. `watch_releases`
runs a forward that autograd does not record, and `with_releases` adds its deaths to the timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from explorer.engine.bench.step import Trainee, autocast
from explorer.engine.bench.timeline import SAVED, Entries, TrackedStep, entries_of, operators_of, window
from explorer.engine.device.allocator import AllocatorLog, Ints, lifetimes
from explorer.engine.model.loaded import call
from explorer.engine.state.rng import RngState
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import BACKWARD, FORWARD, RECOMPUTE, Tracker
from explorer.record.allocations import FIXED_ROLES, PHASES, ROLES, Allocations, PhaseSpan, Saves
from explorer.record.base import Column
from explorer.record.measurement import AllocatorPeaks, MeasuredBlock, Measurement
from explorer.record.policy import Policy

if TYPE_CHECKING:
    from explorer.engine.watch.saved_tensors import SavedTensors

UNATTRIBUTED, WORKSPACE = ROLES.index("unattributed"), ROLES.index("cuBLAS workspace")
_FIXED = [ROLES.index(role) for role in FIXED_ROLES]


class Attribution(NamedTuple):
    """The attributed timeline, and the peaks that the tracker and the allocator's counters read."""

    allocations: Allocations
    phases: tuple[PhaseSpan, ...]
    peaks: AllocatorPeaks


def attribute(log: AllocatorLog, tracker: Tracker, skew_ns: int, saved: SavedTensors | None = None) -> Attribution:
    """The timeline of the step in `log` and `tracker`. `skew_ns` is the allocator's clock minus the tracker's."""
    log = window(log, tracker.begin_ns + skew_ns, tracker.end_ns + skew_ns)  # 1.
    tracked = TrackedStep(tracker)
    lived = lifetimes(log)
    entries, tick_ns = entries_of(log, lived, tracked, skew_ns)  # 2., 3. and 4.
    operator = _operators(entries, tracked, log.clock_grain_ns)  # 5.
    stored = entries.storage != NONE
    roles = np.full(len(stored), UNATTRIBUTED)
    roles[stored] = tracked.roles()[entries.storage[stored]]
    phases = _spans(tracked, tick_ns)
    # 5., last sentence: no operator returns a generator's state.
    roles[~stored & _kept_for_backward(entries, phases, len(tick_ns))] = SAVED
    roles[entries.is_workspace] = WORKSPACE
    blocks = np.where(entries.is_workspace, 0, _blocks(entries, tracked, operator))
    movable = (blocks == 0) & ~np.isin(roles, _FIXED)  # a gradient belongs to its parameter
    entry_of = _entry_of(entries.storage, len(tracked.n_bytes))
    allocations = Allocations(
        n_ticks=len(tick_ns),
        n_bytes=_column(entries.n_bytes),
        born=_column(entries.born),
        died=_column(entries.died),
        role=_column(roles),
        block=_column(blocks),
        op=_column(_by_operator(tracked.op_name, operator)),
        blocks=tracker.fqns,
        ops=tuple(tracker.op_names),
        time_ns=_column(np.maximum(0, np.append(tracker.begin_ns, tick_ns) - tracker.begin_ns)),
        calls=tracker.calls.record(tick_ns, entry_of),
        saves=Saves() if saved is None else saved.record(tick_ns, entry_of),
        line=_column(np.where(movable, _by_operator(tracked.op_line, operator), 0)),
        lines=tuple(tracker.lines.texts),
        weight_casts=_column(np.flatnonzero(np.isin(operator, tracker.casts) & stored)),
        dtype=_column(np.where(stored, tracked.dtype[entries.storage], 0)),
        stream=_streams(tracked, entries),
        dtypes=tuple("" if dtype is None else str(dtype).removeprefix("torch.") for dtype in tracker.storages.dtypes),
    )
    peaks = AllocatorPeaks(
        tracker_peak_bytes=tracked.peak_bytes(confirmed=entry_of != NONE),
        requested_peak_bytes=log.requested_peak_bytes,
        allocated_peak_bytes=log.allocated_peak_bytes,
        reserved_peak_bytes=log.reserved_peak_bytes,
        allocated=_curve(log.allocated, entries),
        reserved=_curve(log.reserved, entries),
    )
    return Attribution(allocations, phases, peaks)


def _entry_of(storages: Ints, n_storages: int) -> Ints:
    """The entry of each storage. Calls name storages by the tracker's numbers; the record knows entries only."""
    entry_of = np.full(n_storages, NONE)
    stored = storages != NONE
    entry_of[storages[stored]] = np.flatnonzero(stored)
    return entry_of


def _streams(tracked: TrackedStep, entries: Entries) -> Column:
    if not tracked.stream.any():
        return Column("q")
    return _column(np.where(entries.storage != NONE, tracked.stream[entries.storage], 0))


def _operators(entries: Entries, tracked: TrackedStep, grain_ns: int) -> Ints:
    """The operator that returned each entry, or ran when the entry was allocated; NONE: outside every operator.

    An allocator with a coarse clock may date an operator's allocation one grain before its beginning or after its end.
    """
    if not tracked.n_ops:
        return np.full(len(entries.storage), NONE)
    running = np.searchsorted(tracked.op_first_ns, entries.time_ns, side="right") - 1
    following = np.minimum(running + 1, tracked.n_ops - 1)
    late_ns = np.where(running >= 0, entries.time_ns - tracked.op_last_ns[np.maximum(running, 0)], np.inf)
    early_ns = np.where(following > running, tracked.op_first_ns[following] - entries.time_ns, np.inf)
    early = (late_ns > 0) & (early_ns < late_ns) & (early_ns <= grain_ns)
    running = np.where(early, following, running)
    inside = early | (late_ns <= grain_ns)
    stored = entries.storage != NONE
    operators = np.where(inside, running, NONE)
    operators[stored] = tracked.made_by[entries.storage[stored]]
    return operators


def _by_operator(values: Ints, operator: Ints) -> Ints:
    """The value of each entry's operator, 0 without one."""
    result = np.zeros(len(operator), dtype=np.int64)
    named = operator != NONE
    result[named] = values[operator[named]]
    return result


def _blocks(entries: Entries, tracked: TrackedStep, operator: Ints) -> Ints:
    """Block of each entry: its tagged owner, else its operator's block, else the running block, else the model."""
    blocks = np.zeros(len(entries.storage), dtype=np.int64)
    if len(tracked.scene_ns):
        scene = np.searchsorted(tracked.scene_ns, entries.time_ns, side="right") - 1
        blocks = np.where(scene >= 0, tracked.scene_block[np.maximum(scene, 0)], 0)
    ran = operator != NONE
    blocks[ran] = tracked.op_block[operator[ran]]
    stored = np.flatnonzero(entries.storage != NONE)
    owner = tracked.owner[entries.storage[stored]]
    blocks[stored[owner != NONE]] = owner[owner != NONE]
    return blocks


def _kept_for_backward(entries: Entries, phases: Sequence[PhaseSpan], n_ticks: int) -> NDArray[np.bool_]:
    """Entries born in a forward, alive at its end and freed before the step ends.

    Such an entry that no operator returned is the generators' state: each checkpoint keeps a copy for its recompute.
    """
    outlives = np.zeros(len(entries.born), dtype=bool)
    for span in phases:
        if span.phase == "forward":
            first = max(span.first_tick, 1)
            outlives |= (entries.born >= first) & (entries.born < span.end_tick) & (entries.died >= span.end_tick)
    return outlives & (entries.died <= n_ticks)


def _spans(tracked: TrackedStep, tick_ns: Ints) -> tuple[PhaseSpan, ...]:
    """Phases in ticks, without gaps. Spans without an event of the allocator are left out."""
    if not len(tracked.scene_ns):
        return ()
    scenes = np.stack((tracked.scene_phase, tracked.scene_rerun))
    changed = np.append(True, (scenes[:, 1:] != scenes[:, :-1]).any(axis=0))
    first = np.searchsorted(tick_ns, tracked.scene_ns[changed]) + 1
    first[0] = 0
    ends = np.append(first[1:], len(tick_ns) + 1)
    spans: list[PhaseSpan] = []
    for phase, rerun, begin, end in zip(*scenes[:, changed].tolist(), first.tolist(), ends.tolist()):
        if begin >= end:
            continue
        block = "" if rerun == NONE else tracked.fqns[rerun]
        if spans and (spans[-1].phase, spans[-1].block) == (PHASES[phase], block):
            begin = spans.pop().first_tick
        spans.append(PhaseSpan(phase=PHASES[phase], block=block, first_tick=begin, end_tick=end))
    return tuple(spans)


def _curve(values: Ints | None, entries: Entries) -> Column | None:
    """A curve of the log at each tick. The first value is from before the first event."""
    return None if values is None else _column(values[np.append(0, entries.events + 1)])


def _column(values: Ints) -> Column:
    return Column("q", np.ascontiguousarray(values, dtype=np.int64).tobytes())


def block_costs(
    tracker: Tracker, log: Allocations, phases: Sequence[PhaseSpan], policy: Policy
) -> tuple[MeasuredBlock, ...]:
    """Costs of all blocks in module order, the model itself first. FLOPs are counted, bytes measured."""
    fqns, number = tracker.fqns, {fqn: i for i, fqn in enumerate(tracker.fqns)}
    parent = [number.get(fqn.rpartition(".")[0], 0) for fqn in fqns]
    size, born, died, role, block = (np.asarray(c) for c in (log.n_bytes, log.born, log.died, log.role, log.block))
    peak = log.peak_tick
    ends = [span.end_tick - 1 for span in phases if span.phase == "forward"]
    saved = (role == SAVED) & (born <= ends[-1]) & (died > ends[-1]) if ends else np.zeros(len(size), dtype=bool)

    def inclusive(values: Sequence[int]) -> list[int]:
        """Each block's value plus the values of all blocks below. A parent comes before its children."""
        total = list(values)
        for i in range(len(total) - 1, 0, -1):
            total[parent[i]] += total[i]
        return total

    def bytes_of(entries: np.ndarray) -> list[int]:
        values = np.zeros(len(fqns), dtype=np.int64)
        np.add.at(values, block[entries], size[entries])
        return inclusive(values.tolist())

    forward, recompute, backward = (
        [tracker.flops.get((phase, i), 0) for i in range(len(fqns))] for phase in (FORWARD, RECOMPUTE, BACKWARD)
    )
    saved_bytes, peak_bytes = bytes_of(saved), bytes_of((born <= peak) & (died > peak))
    in_place = _in_place(tracker)
    skipped = inclusive(_skipped(tracker, parent, policy, forward, recompute))
    forward, recompute, backward = map(inclusive, (forward, recompute, backward))
    return tuple(
        MeasuredBlock(
            fqn=fqn,
            n_forward=tracker.n_forward[i],
            n_recompute=tracker.n_recompute[i],
            saved_after_forward_bytes=saved_bytes[i],
            at_peak_bytes=peak_bytes[i],
            forward_flops=forward[i],
            recompute_flops=recompute[i],
            backward_flops=backward[i],
            skipped_flops=skipped[i],
            in_place=in_place.get(i, {}),
        )
        for i, fqn in enumerate(fqns)
    )


def _in_place(tracker: Tracker) -> dict[int, dict[str, int]]:
    """Forward calls by block of operators whose name says that they write into an argument."""
    calls: dict[int, dict[str, int]] = defaultdict(dict)
    writes = {i for i, name in enumerate(tracker.op_names) if name.count(".") == 2 and name.split(".")[1].endswith("_")}
    names, blocks, phases, *_ = operators_of(tracker).T.tolist()
    for name, block, phase in zip(names, blocks, phases):
        if name in writes and phase == FORWARD:
            calls[block][tracker.op_names[name]] = calls[block].get(tracker.op_names[name], 0) + 1
    return calls


def _skipped(
    tracker: Tracker, parent: Sequence[int], policy: Policy, forward: Sequence[int], recompute: Sequence[int]
) -> list[int]:
    """FLOPs of each block's forward that the innermost unit around the block should rerun, and that did not rerun."""
    scale: dict[int, float] = {}
    number = tracker.scopes.index
    for unit in policy.units:
        members = [number[fqn] for fqn in unit.blocks if fqn in number and tracker.n_forward[number[fqn]]]
        runs = [tracker.n_recompute[i] / tracker.n_forward[i] for i in members]
        scale.update((i, max(runs)) for i in members)
    scales: list[float] = []
    for i in range(len(parent)):
        scales.append(scale.get(i, scales[parent[i]] if i else 0.0))
    return [max(0, round(flops * runs) - again) for flops, runs, again in zip(forward, scales, recompute)]


def uncounted(tracker: Tracker) -> dict[str, int]:
    """Calls of operators without a FLOP formula. The optimizer's operators are left out: no FLOPs include them."""
    names, _, phases, *_ = operators_of(tracker).T
    calls = np.bincount(names[phases <= BACKWARD], minlength=len(tracker.op_names))
    return {tracker.op_names[i]: int(calls[i]) for i in tracker.uncounted if calls[i]}


def watch_releases(trainee: Trainee, tracker: Tracker) -> Tracker | None:
    """Runs forward without autograd under `tracker`; None if the model raises there, or the policy gives no baseline.

    A model that differentiates in its forward raises. Random numbers are restored; other state of the model is not.
    """
    if not _gives_baseline(trainee.spec.policy):
        return None
    drawn = RngState.capture(trainee.model)
    try:
        with tracker, torch.no_grad(), autocast(trainee):
            for inputs, _ in trainee.microbatches():
                call(trainee.model, inputs)
    except Exception:
        return None
    finally:
        drawn.restore()
    return tracker


def _gives_baseline(policy: Policy) -> bool:
    return not policy.use_reentrant and all(unit.action == "recompute" for unit in policy.units)


def with_releases(run: Measurement, watched: Tracker | None) -> Measurement:
    """`run` with `Allocations.released`, if both forwards made the same tensors in the same order."""
    log = run.allocations
    if watched is None or log is None or not _gives_baseline(run.spec.policy):
        return run
    births, drops = _forward(watched)
    born, op = np.asarray(log.born), np.asarray(log.op)
    named = np.array([bool(name) for name in log.ops])[op] & (np.asarray(log.role) != ROLES.index("unattributed"))
    named &= born > 0
    forwards = [(span.first_tick, span.end_tick) for span in run.phases if span.phase == "forward"]
    parts = [np.flatnonzero(named & (first <= born) & (born < end)) for first, end in forwards]
    parts = [part[np.argsort(born[part], kind="stable")] for part in parts]
    if not parts or len(births) % len(parts):
        return run
    n_births = len(births) // len(parts)  # of one microbatch; what its loss makes follows
    entries = np.concatenate([part[:n_births] for part in parts])
    made = [(log.ops[op[entry]], log.blocks[log.block[entry]]) for entry in entries.tolist()]
    if made != births:
        return run
    released = np.zeros(len(born), dtype=np.int64)
    ends = _ends_of_operators(born, op, np.concatenate(parts))
    for birth, last in drops.items():
        released[entries[birth]] = ends[entries[last]] + 1
    return replace(run, allocations=replace(log, released=_column(released)))


def _forward(tracker: Tracker) -> tuple[list[tuple[str, str]], dict[int, int]]:
    """Births in order, and the last birth before the death of each storage that dies before forward ends.

    A birth is an operator and a block. Sizes may differ: tokens of a mixture of experts take other ways.
    """
    storages, ops = tracker.storages, operators_of(tracker)
    numbers: dict[int, int] = {}
    births: list[tuple[str, str]] = []
    drops: dict[int, int] = {}
    for turn in storages.turns:
        index = abs(turn) - 1
        if turn > 0 and index >= storages.n_before_step and storages.made_by[index] != NONE:
            name, block = ops[storages.made_by[index]][:2].tolist()
            numbers[index] = len(births)
            births.append((tracker.op_names[name], tracker.fqns[block]))
        elif turn < 0 and index in numbers:
            drops[numbers[index]] = len(births) - 1
    return births, drops


def _ends_of_operators(born: np.ndarray, op: np.ndarray, entries: np.ndarray) -> dict[int, int]:
    """The last tick at which the operator of each entry allocates; kernels take temporaries after their result."""
    by_operator: dict[int, list[int]] = defaultdict(list)
    for tick, number in sorted(zip(born.tolist(), op.tolist())):
        by_operator[number].append(tick)
    ticks = {number: np.array(births) for number, births in by_operator.items()}
    borders = [*born[entries].tolist(), 2**62]
    ends = {}
    for entry, (_, following) in zip(entries.tolist(), pairwise(borders)):
        births = ticks[int(op[entry])]
        ends[entry] = int(births[np.searchsorted(births, following) - 1])
    return ends
