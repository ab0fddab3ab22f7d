"""A measured timeline sorted for simulation: entries by birth and by block, and the calls of blocks.

How long the code of forward holds a tensor is observed (`Allocations.released`) or inferred from the calls by `let_go`:

    tensor inside a call   released when the call returns
    output of a call       released when the call around it returns, unless it is an output of that call too
    output in a chain      released when the next block, the only user, returns
    unused output there    released when the next block returns: its result takes the place of the tuple

The code may release a tensor earlier."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes, array_of, held
from explorer.plan.names import above
from explorer.record.allocations import PHASES, RANK_ROLES, ROLES, Allocations, Calls, PhaseSpan
from explorer.record.base import Record, column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement

NEVER = 2**62


def graph_under(run: Measurement, graph: ModelGraph | None) -> ModelGraph | None:
    """The graph that was observed under the conditions of `run`: `graph`, or else the one that the run brings.

    What a forward saves, and where its rerun stops, depends on mode, types and frozen parameters. If neither graph is
    of these conditions, as in files of earlier versions, it is `graph`.
    """
    if graph is None or run.graph is None or run.spec.model.is_recorded:
        return graph
    return run.graph if run.graph.conditions == run.spec.conditions != graph.conditions else graph


class Call(Record):
    """One forward call of a block. Its allocations are born after tick `first` and not after tick `end`."""

    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def let_go(
    calls: Mapping[str, Sequence[Call]],
    used_until: Mapping[int, int],
    born: Bytes,
    following: Mapping[str, str],
) -> Bytes:
    """The first tick at which the code of forward no longer holds each entry; NEVER if made outside of blocks.

    `following` names the next block of a chain: it alone uses what the block before it returns.
    """
    named = [(call, fqn) for fqn, of_block in calls.items() for call in of_block]
    named.sort(key=lambda pair: (pair[0].first, -pair[0].end, pair[1].count("."), pair[1]))  # outer ones first
    order = np.argsort(born, kind="stable")
    births = born[order]
    lets = np.full(len(born), NEVER)
    parents: list[int | None] = []
    open_calls: list[int] = []
    for i, (call, _) in enumerate(named):
        while open_calls and named[open_calls[-1]][0].end < call.end:
            open_calls.pop()
        parents.append(open_calls[-1] if open_calls else None)
        open_calls.append(i)
        first, end = np.searchsorted(births, (call.first, call.end), side="right")
        lets[order[first:end]] = call.end + 1
    for i, (call, fqn) in reversed(list(enumerate(named))):  # inner ones first: the outermost that returns it counts
        parent = parents[i]
        around = NEVER if parent is None else named[parent][0].end + 1
        for entry in call.outputs:
            if call.first < born[entry] <= call.end:
                used = used_until.get(entry, 0)
                if fqn not in following:
                    used = NEVER
                elif used <= call.end:
                    used = next(
                        (after.end for after in calls.get(following[fqn], ()) if after.first >= call.end), NEVER
                    )
                lets[entry] = min(around, used + 1)
    return lets


FORWARD, RECOMPUTE, BACKWARD = (PHASES.index(phase) for phase in ("forward", "recompute", "backward"))
SAVED, UNATTRIBUTED = ROLES.index("saved activation"), ROLES.index("unattributed")
SUM = "aten.sum.dim_IntList"
OF_RANKS = [ROLES.index(role) for role in RANK_ROLES]
"""FSDP2 gathers a unit before its rerun, and while the unit after it is in backward: no call of a block makes that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A timeline and its entries, sorted by birth and by block; built once, read at every toggle."""

    line: Bytes
    phase: NDArray[np.int8]
    """Index into PHASES of each tick; -1 outside all spans."""
    size: Bytes
    born: Bytes
    died: Bytes
    role: Bytes
    restored_until: Bytes
    """The tick at which each entry dies if a rerun has made it again, see `_restored_until`."""
    op: Bytes
    """Index into `ops`."""
    ops: tuple[str, ...]
    by_birth: NDArray[np.intp]
    """Entries in order of birth; here and in `by_block` without those of OF_RANKS."""
    births: Bytes
    """Ticks at which an entry is born, ascending, and the tick after the last."""
    results: Bytes
    """Ticks of `births` at which an operator returned the entry, and the tick after the last."""
    by_block: NDArray[np.intp]
    """Entries such that everything below one fqn lies side by side."""
    keys: list[tuple[str, ...]]
    starts: NDArray[np.intp]
    """First place in `by_block` of each key, and the number of entries at the end."""
    calls: dict[str, list[Call]]
    called_alone: tuple[str, ...]
    """Blocks with a call outside of every call of the block around them."""
    used_until: dict[int, int]
    """Last tick of the last call that has the entry as input, by entry."""
    returned_until: dict[int, int]
    """Last tick of the outermost call that makes and returns the entry, by entry."""
    let_go: Bytes
    """The observed moment, else the result of `let_go`, by entry."""
    released: Bytes
    """`Allocations.released`, by entry; 0: not observed."""
    casts: Bytes
    """Entries that autocast keeps until forward ends; empty without autocast."""
    saved_in: dict[int, tuple[str, ...]]
    """The innermost blocks that save an input or output of a block, by entry; see `Block.outputs_saved_in`."""
    saved_outside: dict[str, tuple[bool, ...]]
    """Whether other blocks save each output of a block, by block; see `Block.outputs_saved_outside`."""
    in_containers: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    """Whether each input of a block comes inside a container alone, by block; see `Block.inputs_in_containers`."""
    calls_of_units: dict[object, Sequence[object]] = field(default_factory=dict)
    """Results of `saved_by_calls` in calls.py, which a planner and its forecasts share."""
    backward_births: dict[str, Bytes] = field(default_factory=dict)
    """Ticks at which backward of each block allocates."""

    @classmethod
    def of(cls, measurement: Measurement, graph: ModelGraph | None) -> Replay | None:
        """The replay of `measurement`; None if it has no timeline, or a timeline without calls of blocks."""
        log = measurement.allocations
        if log is None or not measurement.phases or not len(log.calls.block) or measurement.ran_compiled:
            return None
        order = sorted(range(len(log.blocks)), key=lambda i: tuple(log.blocks[i].split(".")))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        ranks, born = rank[array_of(log.block)], array_of(log.born)
        calls = _calls(log.calls, log.blocks)
        every = [call for of_block in calls.values() for call in of_block]
        used_until = _last_ends((call.inputs, call.end) for call in every)
        returned_until = _last_ends(([i for i in call.outputs if born[i] > call.first], call.end) for call in every)
        released = array_of(log.released) if len(log.released) else np.zeros(len(born), dtype=np.int64)
        inferred = let_go(calls, used_until, born, {} if graph is None else graph.next_in_turn)
        made = np.isin(array_of(log.role), OF_RANKS, invert=True)
        by_block, by_birth = (
            order[made[order]] for order in (np.lexsort((born, ranks)), np.argsort(born, kind="stable"))
        )
        return cls(
            line=held(log),
            phase=_phase_of_tick(measurement.phases, log.n_ticks),
            size=array_of(log.n_bytes),
            born=born,
            died=array_of(log.died),
            role=array_of(log.role),
            restored_until=_restored_until(log),
            op=array_of(log.op),
            ops=log.ops,
            by_birth=by_birth,
            births=np.append(born[by_birth], log.n_ticks + 1),
            results=np.append(np.sort(born[array_of(log.role) != UNATTRIBUTED]), log.n_ticks + 1),
            by_block=by_block,
            keys=[tuple(log.blocks[i].split(".")) for i in order],
            starts=np.searchsorted(ranks[by_block], np.arange(len(order) + 1)),
            calls=calls,
            called_alone=tuple(fqn for fqn in calls if _called_alone(fqn, calls)),
            used_until=used_until,
            returned_until=returned_until,
            let_go=np.where(released > 0, released, inferred),
            released=released,
            casts=array_of(log.weight_casts if measurement.spec.autocast != "none" else column()),
            saved_in=_saved_in(calls, graph),
            saved_outside={} if graph is None else {block.fqn: block.outputs_saved_outside for block in graph.blocks},
            in_containers={} if graph is None else {block.fqn: block.inputs_in_containers for block in graph.blocks},
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

    def forward_ends(self, tick: int) -> int:
        """The tick after the last birth of the forward that contains `tick`."""
        later = np.flatnonzero(self.phase[tick:] != FORWARD)
        border = tick + int(later[0]) if len(later) else len(self.line)
        return int(self.births[np.searchsorted(self.births, border) - 1]) + 1

    def born_in(self, fqn: str, entries: Bytes) -> int:
        """Bytes of the `entries` that calls of `fqn` allocated."""
        calls, born = self.calls.get(fqn, []), self.born[entries]
        if not calls:
            return 0
        place = np.searchsorted([call.first for call in calls], born) - 1
        is_inside = (place >= 0) & (born <= np.array([call.end for call in calls])[place])
        return int(self.size[entries[is_inside]].sum())


def _calls(calls: Calls, blocks: Sequence[str]) -> dict[str, list[Call]]:
    by_block: dict[str, list[Call]] = defaultdict(list)
    place = 0
    entries = calls.entries.tolist()
    for block, first, end, n_inputs, n_outputs in zip(
        calls.block, calls.first_tick, calls.end_tick, calls.n_inputs, calls.n_outputs
    ):
        outputs = place + n_inputs
        by_block[blocks[block]].append(
            Call(
                first=first,
                end=end,
                inputs=tuple(entries[place:outputs]),
                outputs=tuple(entries[outputs : outputs + n_outputs]),
            )
        )
        place = outputs + n_outputs
    return dict(by_block)


def _called_alone(fqn: str, calls: Mapping[str, Sequence[Call]]) -> bool:
    around = calls.get(next((name for name in above(fqn) if name in calls), fqn), ())
    begins = [call.first for call in around]
    places = [(bisect_right(begins, call.first) - 1, call.end) for call in calls[fqn]]
    return any(place < 0 or around[place].end < end for place, end in places)


def _last_ends(calls: Iterable[tuple[Sequence[int], int]]) -> dict[int, int]:
    """The latest end of the calls that have an entry, by entry."""
    until: dict[int, int] = {}
    for entries, end in calls:
        for entry in entries:
            until[entry] = max(until.get(entry, 0), end)
    return until


def _saved_in(calls: Mapping[str, Sequence[Call]], graph: ModelGraph | None) -> dict[int, tuple[str, ...]]:
    saved_in: dict[int, tuple[str, ...]] = {}
    for block in () if graph is None else graph.blocks:
        for call in calls.get(block.fqn, ()):
            for entries, savers in ((call.inputs, block.inputs_saved_in), (call.outputs, block.outputs_saved_in)):
                if len(entries) == len(savers):
                    saved_in.update(zip(entries, savers))
    return saved_in


def _restored_until(log: Allocations) -> Bytes:
    """Before the sum that brings a gradient to its shape, if an entry is measured to die after such a sum.

    Autograd sums the results of a node after the node has returned, and releases what the node saved after that. A
    tensor that a checkpoint has restored is held by the node's call alone.
    """
    born, died, role = array_of(log.born), array_of(log.died), array_of(log.role)
    is_sum = np.isin(array_of(log.op), [i for i, name in enumerate(log.ops) if name == SUM])
    ends = np.minimum(died, log.n_ticks + 1)
    births, sum_events = np.zeros((2, log.n_ticks + 2), dtype=bool)
    births[born] = True
    sum_events[born[is_sum & (born > 0)]] = True
    sum_events[ends[is_sum]] = True
    before, begin = np.arange(log.n_ticks + 2), -1
    for tick in range(1, log.n_ticks + 1):
        follows = begin >= 0 and sum_events[tick - 1]
        if sum_events[tick] and (births[tick] or follows):
            begin = begin if follows else tick
        elif births[tick]:
            begin = -1
        elif begin >= 0:
            before[tick] = begin
    return np.where(role == SAVED, before[ends], died)


def _phase_of_tick(phases: tuple[PhaseSpan, ...], n_ticks: int) -> NDArray[np.int8]:
    codes = np.full(n_ticks + 2, -1, dtype=np.int8)
    for span in phases:
        codes[span.first_tick : span.end_tick] = PHASES.index(span.phase)
    return codes
