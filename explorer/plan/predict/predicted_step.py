"""The step of a policy, event by event: the measured timeline with the policy's frees and reruns written into it.

The forecast needs only the bytes at each event (`changes.py`). An allocator needs the order in which blocks come and
go, inside a rerun too. Each event has a key; the keys in ascending order are the new timeline:

    (tick, FREE)                  what the policy frees before the event at that tick, and what it keeps for itself
    (tick, RERUN, call, tick')    the event of `tick'` in forward, made again in the rerun before that tick
    (tick, EVENT)                 the event of the measured timeline
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from explorer.plan.predict.baseline import without_readings
from explorer.plan.predict.calls import COUNTER_BYTES
from explorer.plan.predict.changes import Nest, Simulation, rerun_events
from explorer.plan.predict.replay import Replay
from explorer.record.allocations import ROLES, Allocations, Phase, PhaseSpan
from explorer.record.base import Column, column
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy

FREE, RERUN, EVENT = range(3)
Key = tuple[int, int, int, int]
RECOMPUTED, UNATTRIBUTED = ROLES.index("recomputed"), ROLES.index("unattributed")


class _Life(NamedTuple):
    """An entry of the new timeline: the entry that it repeats, or -1, its bytes and role, its birth and death."""

    entry: int
    size: int
    role: int
    born: Key
    died: Key


def predicted_step(baseline: Measurement, policy: Policy, simulation: Simulation) -> Measurement:
    """The step of `policy`. Its figures by block are those of the baseline."""
    log, nest = baseline.allocations, simulation.nest
    assert log is not None, "it was replayed"
    written: list[_Life] = []
    restored = _write_lives(written, simulation)
    for i, call in enumerate(nest.calls):
        _write_rerun(written, simulation.replay, nest, i, restored[i])
        if nest.stash_bytes:
            lifetime = (call.first + 1, FREE, 1, 0), (call.backward_ends, FREE, 0, 0)
            written.append(_Life(-1, nest.stash_bytes, UNATTRIBUTED, *lifetime))
    allocations, phases = _timeline(written, baseline, log, nest.names)
    spec = replace(baseline.spec, policy=policy)
    return replace(without_readings(baseline), spec=spec, allocations=allocations, phases=phases)


def _write_lives(written: list[_Life], simulated: Simulation) -> list[dict[int, Key]]:
    """Writes each stretch that begins in the measured timeline. Returns the stretches that begin in a rerun: their ends
    by entry, for each call."""
    replay, nest = simulated.replay, simulated.nest
    restored: list[dict[int, Key]] = [{} for _ in nest.calls]
    calls_at = defaultdict(list)
    for i, call in enumerate(nest.calls):
        calls_at[call.backward_begins].append(i)
    stretches: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry, first, end in zip(*(part.tolist() for part in simulated.lives)):
        stretches[entry].append((first, end))
    read_in = {  # a kept result goes where its rerun reads it
        (entry, end): (end, RERUN, i, int(replay.died[entry]))
        for i, call in enumerate(nest.calls)
        for entry, _, end in call.kept_results
        if end == call.backward_begins
    }
    for call in nest.calls:  # an output that other blocks hold until their backward is made again
        for entry in {*call.saved_outputs, *call.entries[call.freed_at >= call.backward_begins].tolist()}:
            lives = stretches.setdefault(entry, [(int(replay.born[entry]), int(replay.died[entry]))])
            split = [(a, b) for a, b in lives if a < call.backward_begins < b]
            for a, b in split:
                lives.remove((a, b))
                lives += [(a, call.backward_begins), (call.backward_begins, b)]
    born, died, size, role = (array.tolist() for array in (replay.born, replay.died, replay.size, replay.role))
    for entry in range(len(born)):
        for first, end in stretches.get(entry, ((born[entry], died[entry]),)):
            if first >= end:
                continue
            dies = read_in.get((entry, end), (end, EVENT if end == died[entry] else FREE, 0, 0))
            if first == born[entry]:
                written.append(_Life(entry, size[entry], role[entry], (first, EVENT, 0, 0), dies))
                continue
            makers = [i for i in calls_at[first] if nest.calls[i].first < born[entry] <= nest.calls[i].end]
            if makers:
                owner = int(simulated.owner[entry])
                restored[owner if owner in makers else makers[0]][entry] = dies
            else:
                written.append(_Life(entry, size[entry], role[entry], (first, RERUN, -1, 0), dies))
    return restored


def _write_rerun(written: list[_Life], replay: Replay, nest: Nest, i: int, restored: dict[int, Key]) -> None:
    """The rerun of call `i`: what it restores lives on, everything else ends with it."""
    call = nest.calls[i]
    entries, freed_at, last = rerun_events(replay, nest, i)

    def again(tick: int) -> Key:
        return call.backward_begins, RERUN, i, tick

    for entry, freed in zip(entries.tolist(), freed_at.tolist()):
        born, dies = again(int(replay.born[entry])), restored.pop(entry, again(min(freed, last + 1)))
        written.append(_Life(entry, int(replay.size[entry]), RECOMPUTED, born, dies))
    for entry, dies in restored.items():  # kept longer than the rerun reaches
        written.append(_Life(entry, int(replay.size[entry]), RECOMPUTED, again(last + 1), dies))
    for _, end, n_bytes in call.copies:
        written.append(_Life(-1, n_bytes, UNATTRIBUTED, again(0), (end, FREE, 0, 0)))
    rest = call.statistics_bytes - sum(n_bytes for _, _, n_bytes in call.copies)
    counters = [rest] if rest else []
    if call.copies:
        counters = [COUNTER_BYTES] * (rest // COUNTER_BYTES)
    for n_bytes in counters:
        written.append(_Life(-1, n_bytes, UNATTRIBUTED, again(0), again(last + 1)))


def _of_entries(values: Column, written: Sequence[_Life]) -> Column:
    """A column of the log for `written`, 0 for entries that the log lacks; empty if the log lacks the column."""
    if not values:
        return column()
    return column(values[life.entry] if life.entry >= 0 else 0 for life in written)


def _timeline(
    written: list[_Life], baseline: Measurement, log: Allocations, names: Sequence[str]
) -> tuple[Allocations, tuple[PhaseSpan, ...]]:
    """The events in order, one a tick, and the phases over them."""
    before, after = 0, log.n_ticks + 1
    events = []  # (key, whether it is a birth, index): of equal keys, frees come first
    for index, life in enumerate(written):
        if life.born[0] > before:
            events.append((life.born, 1, index))
        if life.died[0] < after:
            events.append((life.died, 0, index))
    events.sort()
    born_at, died_at = [0] * len(written), [len(events) + 1] * len(written)
    spans: list[PhaseSpan] = []
    phase_of = _labels(baseline.phases, log)
    label, start = phase_of[0], baseline.phases[0].first_tick
    for tick, (key, is_birth, index) in enumerate(events, 1):
        (born_at if is_birth else died_at)[index] = tick
        at, kind, call, _ = key
        here: tuple[Phase, str] = ("recompute", names[call]) if kind == RERUN and call >= 0 else phase_of[at]
        if kind == FREE:
            here = phase_of[at - 1]
        if here != label:
            if tick > start:
                spans.append(PhaseSpan(phase=label[0], block=label[1], first_tick=start, end_tick=tick))
            label, start = here, tick
    spans.append(PhaseSpan(phase=label[0], block=label[1], first_tick=start, end_tick=len(events) + 1))
    blocks, ops = (*log.blocks, ""), (*log.ops, "")
    blank = len(log.blocks), len(log.ops)
    allocations = Allocations(
        n_ticks=len(events),
        n_bytes=column(life.size for life in written),
        born=column(born_at),
        died=column(died_at),
        role=column(life.role for life in written),
        block=column(log.block[life.entry] if life.entry >= 0 else blank[0] for life in written),
        op=column(log.op[life.entry] if life.entry >= 0 else blank[1] for life in written),
        blocks=blocks,
        ops=ops,
        stream=_of_entries(log.stream, written),
        line=_of_entries(log.line, written),
        lines=log.lines,
        time_ns=column(),
    )
    return allocations, tuple(spans)


def _labels(phases: Sequence[PhaseSpan], log: Allocations) -> list[tuple[Phase, str]]:
    """Phase and block of each tick; ticks before the first phase count as its own."""
    labels: list[tuple[Phase, str]] = [("between", "")] * (log.n_ticks + 2)
    for first, span in zip((0, *(span.first_tick for span in phases[1:])), phases):
        labels[first : span.end_tick] = [(span.phase, span.block)] * (span.end_tick - first)
    return labels
