"""Tensors that each call of a unit saves for its backward, and that a recompute of the unit would free.

Rules 1, 2 and 4 to 6 of this room, for one call. A segment is called once for each time that all its blocks are called.

Not predicted: what a kernel keeps for itself (oneDNN's recurrent layers: peaks up to 7 % off), and, without a graph,
outputs that no other block saves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes, Mask, ints
from explorer.plan.names import is_within, operator_word
from explorer.plan.predict.replay import BACKWARD, FORWARD, NEVER, RECOMPUTE, SAVED, UNATTRIBUTED, Call, Replay
from explorer.plan.predict.step_cost import run_again
from explorer.record.allocations import ROLES
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit

RNG_STATE_BYTES = 5056
"""State of torch's CPU generator (torch.get_rng_state), which every checkpoint call keeps; a GPU's lies on the CPU."""
CAST = "aten._to_copy.default"


def stash_bytes(measurement: Measurement, policy: Policy) -> int:
    """Bytes that every checkpoint call keeps on the measured device for its generator; a step for a card has none."""
    on_cpu = measurement.environment.device == "cpu" and measurement.card is None
    return RNG_STATE_BYTES if policy.preserve_rng_state and on_cpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedByCall:
    """Tensors that one call of a unit saves for its backward, and that a recompute would free."""

    first: int
    """Last tick before the call."""
    entries: Bytes
    freed_at: Bytes
    """First tick at which each of `entries` is freed."""
    backward_begins: int
    """Tick at which backward of the call begins and all `entries` are restored."""
    backward_ends: int
    """Tick at which the last of `entries` dies."""
    end: int
    """Last tick of the call."""
    rerun_ends: int
    """Tick of forward that the rerun stops at."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Outputs that no other block saves."""
    saved_outputs: tuple[int, ...]
    """Outputs that the call itself saves, including outputs that other blocks save too."""
    late_bytes: int
    """Bytes freed only when backward of the call begins: late `entries`, and outputs that other blocks save too.
    Backward of the other blocks has ended by then."""
    rerun_bytes: int
    """Peak bytes of the rerun alone."""
    blocks: tuple[str, ...] = ()
    in_containers: tuple[int, ...] = ()
    """Inputs that come inside a tuple, list or object alone."""
    kept_results: tuple[tuple[int, int, int], ...] = ()
    """Entries that stay alive whatever was measured: entry, first tick, end tick."""
    copies: tuple[tuple[int, int, int], ...] = ()
    """First tick, end tick and bytes of each tensor that exists twice."""
    statistics_bytes: int = 0
    """Part of `rerun_bytes`: copies of running statistics, which a rerun updates instead of the originals."""


def saved_by_calls(replay: Replay, unit: Sequence[str], *, stops_early: bool) -> list[SavedByCall]:
    """Saved tensors of each call of the kept `unit` (a block, or the blocks of a segment) that saves any."""
    key = (tuple(unit), stops_early)
    if key not in replay.calls_of_units:
        calls = list(zip(*(replay.calls.get(fqn, []) for fqn in unit)))
        births = _births_of_backward(replay, unit, calls)
        each = (_saved_by_call(replay, unit, *call, stops_early=stops_early) for call in zip(calls, births))
        replay.calls_of_units[key] = [call for call in each if call is not None]
    return cast("list[SavedByCall]", list(replay.calls_of_units[key]))


def _saved_by_call(
    replay: Replay, unit: Sequence[str], members: Sequence[Call], births: Bytes, *, stops_early: bool
) -> SavedByCall | None:
    """One call of a unit, None if it saves nothing for its backward.

    `members` are the calls of the unit's blocks, `births` the ticks at which backward allocates inside the unit.
    """
    first, end, born, died = members[0].first, members[-1].end, replay.born, replay.died
    saved = replay.between(first, end)
    dies_in_forward = replay.phase[np.minimum(died[saved], len(replay.line) - 1)] == FORWARD
    saved = saved[(replay.role[saved] == SAVED) & ~dies_in_forward]
    own_outputs = _own_outputs(replay, unit[-1], members[-1])
    saved = saved[~np.isin(saved, [entry for entry in members[-1].outputs if entry not in own_outputs])]
    begins = _first_read(replay, births)
    if begins is None:
        freed = saved if len(saved) else _freed_in_backward(replay, members[0].inputs)
        if not len(freed):
            return None
        begins = int(died[freed].min())
    # An entry that dies earlier is held by later blocks: recompute would not free it.
    saved = saved[died[saved] >= begins]
    # An output that other blocks hold and the unit saves too is freed in backward of the unit.
    saved_outputs = [entry for entry in members[-1].outputs if first < born[entry] and died[entry] >= begins]
    saved_outputs = _without_held(replay, saved_outputs)
    inner = np.concatenate((saved[~np.isin(saved, own_outputs)], ints(saved_outputs)))
    last = int(born[inner].max(initial=first))
    again = replay.between(first, last if stops_early else end)
    leaves = _leaves(replay, saved, members, own_outputs)
    inputs, flags = members[0].inputs, replay.in_containers.get(unit[0], ())
    # The first operator that reads an input is often the last of backward: what it saves lives until it has run.
    runs_last = any(is_within(fqn, *unit) for i in inputs for fqn in replay.saved_in.get(i, ()))
    last_birth = int(births.max(initial=begins)) + (runs_last and len(births) > 0)
    every = np.union1d(saved, saved_outputs).astype(np.int64)
    return SavedByCall(
        first=first,
        entries=saved,
        freed_at=leaves,
        backward_begins=begins,
        backward_ends=_ends(died, every, (*own_outputs, *saved_outputs), last_birth),
        end=end,
        rerun_ends=last if stops_early else end,
        inputs=inputs,
        blocks=tuple(unit),
        in_containers=tuple(i for i, flag in zip(inputs, flags) if flag) if len(flags) == len(inputs) else (),
        outputs=tuple(own_outputs),
        saved_outputs=tuple(saved_outputs),
        late_bytes=late_bytes(replay, saved, leaves >= begins, saved_outputs),
        rerun_bytes=most_at_once(replay.size[again], born[again], died[again]),
    )


def _first_read(replay: Replay, births: Bytes) -> int | None:
    """The first of these ticks of backward at which a saved tensor may be read: a cast of the gradient reads none."""
    if not len(births):
        return None
    ops = replay.op[replay.by_birth[np.searchsorted(replay.births, births)]]
    is_cast = np.isin(ops, [i for i, name in enumerate(replay.ops) if name == CAST])
    return int(births[is_cast.argmin()])


def only_of(replay: Replay, calls: Sequence[SavedByCall]) -> tuple[Replay, list[SavedByCall]]:
    """The replay of only the entries that `calls` touch, which are numbered from 0, and `calls` with these numbers.

    The line stays whole. The work on one unit of a long timeline then grows with the unit, not with the timeline.
    """
    inputs = [entry for call in calls for entry in call.inputs]
    results = [entry for call in calls for entry, *_ in call.kept_results]
    entries = np.unique(np.concatenate([*(call.entries for call in calls), inputs, results])).astype(np.int64)
    number = {entry: i for i, entry in enumerate(entries.tolist())}

    def numbered(call: SavedByCall) -> SavedByCall:
        return replace(
            call,
            entries=np.searchsorted(entries, call.entries),
            inputs=tuple(number[entry] for entry in call.inputs),
            kept_results=tuple((number[entry], first, end) for entry, first, end in call.kept_results),
        )

    sizes, born, died = replay.size[entries], replay.born[entries], replay.died[entries]
    part = replace(replay, size=sizes, born=born, died=died, restored_until=replay.restored_until[entries])
    return part, list(map(numbered, calls))


def _freed_in_backward(replay: Replay, entries: Sequence[int]) -> Bytes:
    saved: Bytes = ints(entries)
    saved = saved[replay.role[saved] == SAVED]
    freed: Bytes = saved[replay.phase[np.minimum(replay.died[saved], len(replay.line) - 1)] == BACKWARD]
    return freed


def _births_of_backward(replay: Replay, unit: Sequence[str], calls: Sequence[Sequence[Call]]) -> list[Bytes]:
    """Ticks at which backward of each call allocates inside the unit.

    The array of a call is empty if several calls precede the allocations: the timeline cannot assign them to a call.
    """
    if not calls:
        return []
    births = np.concatenate([_births_below(replay, fqn) for fqn in unit])
    births = np.sort(births[births > calls[0][-1].end])
    places = np.searchsorted(births, [members[0].first for members in calls]).tolist()
    ends = [*places[1:], len(births)]
    return [births[place:end] if places.count(place) == 1 else births[:0] for place, end in zip(places, ends)]


def _births_below(replay: Replay, fqn: str) -> Bytes:
    """Ticks at which backward allocates in the calls of `fqn`."""
    if fqn not in replay.backward_births:
        entries = replay.below(fqn)
        alone = [name for name in replay.called_alone if is_within(name, fqn) and name != fqn]
        if alone:  # backward of a call outside of the block
            entries = np.setdiff1d(entries, np.concatenate([replay.below(name) for name in alone]))
        births = replay.born[entries]
        phase = replay.phase[births]
        replay.backward_births[fqn] = births[(phase == RECOMPUTE) | (phase == BACKWARD)]
    return replay.backward_births[fqn]


def _ends(died: Bytes, saved: NDArray[np.intp], outputs: Sequence[int], ends: int) -> int:
    """The tick at which the last of `saved` dies, at least `ends`.

    Of `outputs` at most the tick after `ends` counts, since other code may hold one longer, as a loop holds its loss.
    An output may be what the last node of backward reads, as that of a ReLU: the node runs to its end.
    """
    ends = int(died[saved[~np.isin(saved, outputs)]].max(initial=ends))
    return max(ends, min(int(died[saved].max(initial=0)), ends + 1))


def _without_held(replay: Replay, outputs: Sequence[int]) -> list[int]:
    """`outputs` without those that a variable of the loop holds: the model returns them, and they outlive backward."""
    freed = list(outputs)
    for call in replay.calls.get("", ()):
        for entry in set(call.outputs).intersection(outputs):
            if entry in freed and (replay.phase[int(replay.died[entry]) :] != BACKWARD).all():
                freed.remove(entry)
    return freed


def _own_outputs(replay: Replay, fqn: str, call: Call) -> list[int]:
    """Outputs that no other block saves and whose last use is known."""
    flags = replay.saved_outside.get(fqn, ())
    if len(flags) != len(call.outputs):
        return []
    unshared = [entry for entry, outside in zip(call.outputs, flags) if not outside]
    ending = [entry for entry in unshared if entry in replay.used_until or replay.let_go[entry] < NEVER]
    return _without_held(replay, ending)


def _leaves(replay: Replay, saved: NDArray[np.intp], members: Sequence[Call], own_outputs: Sequence[int]) -> Bytes:
    """The tick at which each entry is freed: after the last saved tensor of its block.

    An output inside a segment is freed after the next block.
    """
    born = replay.born[saved]  # ascending
    leaves = np.zeros(len(born), dtype=np.int64)
    borders = np.searchsorted(born, [(call.first, call.end) for call in members], side="right").tolist()
    for i, (here, behind) in enumerate(borders):
        if here < behind:
            last, call = int(born[behind - 1]), members[i]
            leaves[here:behind] = last + 1
            if i + 1 < len(members):
                leaves[np.searchsorted(born, last) : behind] = members[i + 1].end + 1
            else:
                then = int(replay.results[np.searchsorted(replay.results, last, side="right")])
                leaves[np.searchsorted(born, last) : behind] = (then if then <= call.end else last) + 1
    leaves = np.minimum(leaves, replay.let_go[saved])
    for entry in own_outputs:
        used, returned = replay.used_until.get(entry, -1), replay.returned_until.get(entry, 0)
        leaves[saved == entry] = used + 1 if used > returned else replay.let_go[entry]
    observed = replay.released[saved]
    leaves = np.where(observed > 0, observed, leaves)
    if len(replay.casts) and len(saved):
        leaves[np.isin(saved, replay.casts)] = replay.forward_ends(members[-1].end)
    return leaves


def kept_by_containers(
    replay: Replay, nested: Sequence[tuple[SavedByCall, SavedByCall]]
) -> tuple[dict[int, int], set[int]]:
    """Tensors that calls are given in containers (rule 2), of `nested` calls, each with the outermost call around it.

    Until when the tensor that forward made stays, by entry; and the entries that no other operator saves.
    """
    until: dict[int, int] = {}
    savers: dict[int, set[str]] = {}
    for call, outermost in nested:
        for entry in call.in_containers:
            if outermost.first < replay.born[entry] <= outermost.end:
                until[entry] = max(until.get(entry, 0), call.backward_ends)
                others = savers.setdefault(entry, set(replay.saved_in.get(entry, ("",))))
                others -= {fqn for fqn in others if is_within(fqn, *call.blocks)}
    return until, {entry for entry, others in savers.items() if not others}


def late_bytes(replay: Replay, entries: Bytes, late: Mask, saved_outputs: Sequence[int]) -> int:
    """`SavedByCall.late_bytes`; mask `late` marks the `entries` that are freed when backward begins."""
    others = np.setdiff1d(ints(saved_outputs), entries)
    return int(replay.size[entries[late]].sum() + replay.size[others].sum())


def most_at_once(size: Bytes, born: Bytes, died: Bytes) -> int:
    """Peak bytes of the entries alone, over the ticks at which one of them is born."""
    return int(bytes_at(np.sort(born), size, born, died).max(initial=0))


def bytes_at(ticks: Bytes, size: Bytes, born: Bytes, died: Bytes) -> Bytes:
    """Bytes of the entries at each of the ascending `ticks`."""
    steps = np.zeros(len(ticks) + 1, dtype=np.int64)
    np.add.at(steps, np.searchsorted(ticks, born), size)
    np.subtract.at(steps, np.searchsorted(ticks, died), size)
    return np.cumsum(steps[:-1])


BUFFER = ROLES.index("buffer")
COUNTER_BYTES = 8
"""Size of num_batches_tracked, which no norm computes with."""


def calls_of(
    replay: Replay, graph: ModelGraph | None, unit: Unit, policy: Policy, inside: Collection[str] = ()
) -> list[SavedByCall]:
    """Calls of `unit` under its action and the options of `policy`; `inside` are the blocks of the units in it."""
    if not run_again(graph, unit.blocks, policy):
        return []  # a checkpoint around blocks that save nothing is freed when forward returns
    calls = saved_by_calls(replay, unit.blocks, stops_early=policy.stops_early)
    if unit.action == "save_ops":
        calls = [_with_results(replay, call, unit.save_ops) for call in calls]
    if policy.running_stats == "once" and graph is not None:
        norms = norms_below(graph, unit.blocks)
        calls = [_with_statistics(replay, norms, call, inside) for call in calls]
    return calls


def _with_statistics(replay: Replay, norms: Sequence[str], call: SavedByCall, inside: Collection[str]) -> SavedByCall:
    """`call` with copies of running statistics (rule 5)."""
    copies, n_bytes = list(call.copies), 0
    for fqn in norms:
        below = replay.below(fqn)
        sizes = [int(size) for size in replay.size[below[replay.role[below] == BUFFER]]]
        saved = below[
            (replay.role[below] == SAVED) & (replay.born[below] > call.first) & (replay.born[below] <= call.end)
        ]
        n_bytes += sum(sizes)
        if len(saved) and not is_within(fqn, *inside):
            until = int(replay.died[saved].max())
            copies += [(call.backward_begins, until, size) for size in sizes if size > COUNTER_BYTES]
    if not n_bytes:
        return call
    rerun_bytes = call.rerun_bytes + n_bytes
    return replace(call, copies=tuple(copies), rerun_bytes=rerun_bytes, statistics_bytes=n_bytes)


def norms_below(graph: ModelGraph, blocks: Sequence[str]) -> list[str]:
    """Norms with running statistics in `blocks`."""
    return [name for name in graph.norms if is_within(name, *blocks)]


def results_unknown(replay: Replay, save_ops: Iterable[str]) -> tuple[str, ...]:
    """Operators of `save_ops` that allocate no result: views, and operators that write into an argument."""
    made = {replay.ops[i] for i in np.unique(replay.op[replay.role != UNATTRIBUTED]).tolist()}
    return tuple(op for op in save_ops if results_of_views((op,)) or (op in replay.ops and op not in made))


def results_of_views(save_ops: Iterable[str]) -> tuple[str, ...]:
    """Operators of `save_ops` that are views by their names."""
    return tuple(op for op in save_ops if operator_word(op) in _VIEWS)


def _with_results(replay: Replay, call: SavedByCall, save_ops: Sequence[str]) -> SavedByCall:
    ops = ints([i for i, name in enumerate(replay.ops) if name in save_ops])
    made = replay.between(call.first, call.end)
    results = made[np.isin(replay.op[made], ops) & (replay.role[made] != UNATTRIBUTED)]
    stays = np.where(replay.born[results] <= call.rerun_ends, call.backward_begins, call.backward_ends)
    leaving = ~np.isin(call.entries, results)
    entries, leaves = call.entries[leaving], call.freed_at[leaving]
    shared = [entry for entry in call.saved_outputs if entry in results]
    saved_outputs = tuple(entry for entry in call.saved_outputs if entry not in shared)
    return replace(
        call,
        entries=entries,
        freed_at=leaves,
        kept_results=tuple(zip(results.tolist(), replay.born[results].tolist(), stays.tolist())),
        saved_outputs=saved_outputs,
        late_bytes=late_bytes(replay, entries, leaves >= call.backward_begins, saved_outputs),
        rerun_bytes=_again_without(replay, call, ops),
    )


def _again_without(replay: Replay, call: SavedByCall, ops: Bytes) -> int:
    """Peak bytes that a rerun adds if the kept results exist already. It frees the results that forward freed."""
    again = replay.between(call.first, call.rerun_ends)
    of_these = np.isin(replay.op[again], ops)
    temporary, results = again[~of_these], again[of_these & (replay.role[again] != UNATTRIBUTED)]
    results = results[replay.died[results] <= call.end]
    return max(
        0,
        most_at_once(
            np.concatenate((replay.size[temporary], -replay.size[results])),
            np.concatenate((replay.born[temporary], replay.died[results])),
            np.concatenate((replay.died[temporary], np.full(len(results), NEVER))),
        ),
    )


_VIEWS = frozenset(
    {"alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice"}
    | {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"}
    | {"view_as_complex", "view_as_real", "_reshape_alias", "_unsafe_view", "real", "imag"}
)
