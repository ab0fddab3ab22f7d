"""What a unit leaves behind that does more, or less, than run again: by the rules of saved_by_call.py, but for these.

save_ops    What the named operators returned stays from forward on, whether backward needs it or not: what the rerun
            asks for is handed out and then lives as in forward, what it stops before stays until backward has ended.
            The rerun allocates nothing for these operators. When a unit around it runs again it keeps them once more,
            for as long as that one runs, and what that one saves itself of them is there twice.
reentrant   The whole forward runs again; its outputs are there twice, and they, the inputs and the gradient that came
            in stay until backward has ended. In a unit around it nothing is kept before that one runs again.
offload     Nothing runs again. On a GPU what only offloaded blocks save leaves once it was used, and comes back for the
            operation of backward that frees it; what others save as well stays, and comes back beside it. On the CPU
            nothing moves, see offload_inside.py.

Not foreseen: units inside one that keeps results, whose rerun hands out what they save and nobody knows for how long;
for how long a copy to the host is under way, and which variables of forward's code keep a tensor that is used no more.
Source: torch.utils.checkpoint (CheckpointFunction, _CachedTorchDispatchMode), engine/policy/offload.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from explorer.plan.forecast.offload_inside import kept_by, without
from explorer.plan.forecast.replay import BACKWARD, FORWARD, SAVED, UNATTRIBUTED, Replay
from explorer.plan.forecast.rerun_flops import run_again
from explorer.plan.forecast.saved_by_call import SavedByCall, late_bytes, most_at_once, saved_by_calls
from explorer.plan.memory.series import Bytes, Mask
from explorer.plan.names import is_within, operator_word
from explorer.record.allocations import ROLES
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

BUFFER = ROLES.index("buffer")
FOREVER = 2**62
COUNTER_BYTES = 8
"""num_batches_tracked, with which no norm computes."""


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """The measured step that a policy is played through."""

    replay: Replay
    graph: ModelGraph | None
    on_gpu: bool
    offloaded: tuple[Unit, ...] = ()

    @cached_property
    def offloaded_blocks(self) -> tuple[str, ...]:
        return tuple(fqn for unit in self.offloaded for fqn in unit.blocks)

    @cached_property
    def kept(self) -> dict[Unit, Bytes]:
        """By offloaded unit the entries that its calls keep where nothing moves."""
        return {unit: kept_by(self.replay, unit) for unit in self.offloaded}

    @cached_property
    def handed_until(self) -> dict[int, int]:
        """By entry that calls of offloaded units are given or return, the tick at which the last of these ends."""
        until: dict[int, int] = {}
        for unit in self.offloaded:
            for members in zip(*(self.replay.calls.get(fqn, ()) for fqn in unit.blocks)):
                for entry in (*members[0].inputs, *members[-1].outputs):
                    until[entry] = max(until.get(entry, 0), members[-1].end)
        return until


def calls_of(step: PlayedStep, unit: Unit, policy: Policy, inside: Collection[str] = ()) -> list[SavedByCall]:
    """What each call of `unit` leaves behind under its action and the options of `policy`; `inside` are its units."""
    if not run_again(step.graph, unit.blocks, policy) or (unit.action == "offload" and not step.on_gpu):
        return []  # a checkpoint around what saves nothing is gone when forward returns
    replay = step.replay
    calls = saved_by_calls(replay, unit.blocks, stops_early=policy.stops_early)
    if unit.action == "offload":
        return [_offloaded(step, call) for call in calls]
    if kept := {
        one: step.kept[one] for one in step.offloaded if any(is_within(one.blocks[0], fqn) for fqn in unit.blocks)
    }:
        calls = [without(replay, unit.blocks, call, kept, stops_early=policy.stops_early) for call in calls]
    if policy.use_reentrant:
        calls = [_reentrant(replay, call, alone=len(calls) == 1) for call in calls]
    elif unit.action == "save_ops":
        calls = [_with_results(replay, call, unit.save_ops) for call in calls]
    if policy.running_stats == "once" and step.graph is not None:
        calls = [_with_statistics(step, unit, call, inside) for call in calls]
    return calls


def _with_statistics(step: PlayedStep, unit: Unit, call: SavedByCall, inside: Collection[str]) -> SavedByCall:
    """A rerun moves copies of running statistics; those that a norm computes with live until its backward."""
    replay, copies, n_bytes = step.replay, list(call.copies), 0
    for fqn in _norms_below(step.graph, unit.blocks):
        own = replay.below(fqn)
        sizes = [int(size) for size in replay.size[own[replay.role[own] == BUFFER]]]
        saved = own[(replay.role[own] == SAVED) & (replay.born[own] > call.first) & (replay.born[own] <= call.end)]
        n_bytes += sum(sizes)
        if len(saved) and not any(is_within(fqn, other) for other in inside):
            until = int(replay.died[saved].max())
            copies += [(call.begins, until, size) for size in sizes if size > COUNTER_BYTES]
    again_bytes = call.again_bytes + n_bytes
    return replace(call, copies=tuple(copies), again_bytes=again_bytes, statistics_bytes=n_bytes) if n_bytes else call


def _norms_below(graph: ModelGraph | None, blocks: Sequence[str]) -> list[str]:
    """Norms with running statistics in `blocks`."""
    if graph is None:
        return []
    return [
        one.fqn for one in graph.blocks
        if one.running_statistics and not graph.children[one.fqn] and any(is_within(one.fqn, fqn) for fqn in blocks)
    ]  # fmt: skip


def results_unknown(replay: Replay, save_ops: Iterable[str]) -> tuple[str, ...]:
    """Those of `save_ops` whose results are no memory of their own: views, and what writes into its argument."""
    made = {replay.ops[i] for i in np.unique(replay.op[replay.role != UNATTRIBUTED]).tolist()}
    return tuple(op for op in save_ops if results_of_views((op,)) or (op in replay.ops and op not in made))


def results_of_views(save_ops: Iterable[str]) -> tuple[str, ...]:
    """Those of `save_ops` that are views by their names."""
    return tuple(op for op in save_ops if operator_word(op) in _VIEWS)


def _with_results(replay: Replay, call: SavedByCall, save_ops: Sequence[str]) -> SavedByCall:
    of_these = np.isin(replay.op, [i for i, name in enumerate(replay.ops) if name in save_ops])
    made = replay.between(call.first, call.end)
    results = made[of_these[made] & (replay.role[made] != UNATTRIBUTED)]
    stays = np.where(replay.born[results] <= call.until, call.begins, call.ends)
    leaving = ~np.isin(call.entries, results)
    entries, leaves = call.entries[leaving], call.leaves[leaving]
    shared = [entry for entry in call.saved_outputs if entry in results]
    saved_outputs = tuple(entry for entry in call.saved_outputs if entry not in shared)
    return replace(
        call,
        entries=entries,
        leaves=leaves,
        backs=call.backs[leaving],
        held=tuple(zip(results.tolist(), replay.born[results].tolist(), stays.tolist())),
        saved_outputs=saved_outputs,
        late_bytes=late_bytes(replay, entries, leaves >= call.begins, saved_outputs),
        again_bytes=_again_without(replay, call, of_these),
        results=results,
        saved_results=np.union1d(
            call.entries[~leaving], np.intersect1d(np.array(call.saved_outputs, dtype=np.int64), results)
        ),
    )


def _again_without(replay: Replay, call: SavedByCall, of_these: Mask) -> int:
    """Most that the rerun adds where these are there already: those that forward let go, it lets go as well."""
    again = replay.between(call.first, call.until)
    own, given = again[~of_these[again]], again[of_these[again] & (replay.role[again] != UNATTRIBUTED)]
    given = given[replay.died[given] <= call.end]
    return max(
        0,
        most_at_once(
            np.concatenate((replay.size[own], -replay.size[given])),
            np.concatenate((replay.born[own], replay.died[given])),
            np.concatenate((replay.died[own], np.full(len(given), FOREVER))),
        ),
    )


def _reentrant(replay: Replay, call: SavedByCall, *, alone: bool) -> SavedByCall:
    """The gradients that came into several calls are told from sums for shared parameters by their size."""
    own = set(call.entries.tolist())
    outputs = [entry for entry in dict.fromkeys(call.returned) if entry not in call.inputs]
    arrived = np.flatnonzero((replay.born < call.begins) & (call.begins <= replay.died) & (replay.died < call.ends))
    arrived = arrived[replay.phase[replay.born[arrived]] == BACKWARD]
    if not alone:
        arrived = arrived[np.isin(replay.size[arrived], replay.size[list(call.returned)])]
    return replace(
        call,
        reentrant=True,
        held=tuple((entry, call.begins, call.ends) for entry in [*(o for o in outputs if o in own), *arrived.tolist()]),
        copies=tuple((call.begins, call.ends, int(replay.size[entry])) for entry in outputs if entry not in own),
    )


def _offloaded(step: PlayedStep, call: SavedByCall) -> SavedByCall:
    """What is given or returned leaves with the last that is given it, where all who save it are offloaded."""
    replay, own = step.replay, set(call.entries.tolist())
    around = [entry for entry in dict.fromkeys((*call.inputs, *call.returned)) if entry not in own]
    handed = np.array([entry for entry in around if _leaves_whole(step, call, entry)], dtype=np.int64)
    used = [max(replay.used_until.get(entry, 0), step.handed_until[entry]) + 1 for entry in handed.tolist()]
    entries = np.concatenate((call.entries, handed))
    return replace(
        call,
        entries=entries,
        leaves=np.concatenate((_once_used(replay, call.entries), np.array(used, dtype=np.int64))),
        backs=np.maximum(_needed_from(replay, entries), call.begins),
        copies=tuple(copy for entry in call.inputs for copy in _back_beside(step, call, entry)),
        inputs=(),
        runs_again=False,
        late_bytes=0,
        again_bytes=0,
    )


def _once_used(replay: Replay, entries: Bytes) -> Bytes:
    """When each was made something of and the last block that is given it is through; a variable may keep it longer."""
    made = replay.results[np.searchsorted(replay.results, replay.born[entries], side="right")]
    given = np.array([replay.used_until.get(entry, 0) for entry in entries.tolist()], dtype=np.int64)
    once: Bytes = np.minimum(np.maximum(made, given) + 1, replay.let_go[entries])
    return once


def _leaves_whole(step: PlayedStep, call: SavedByCall, entry: int) -> bool:
    """Whether all who save it are offloaded; where the graph does not say, whether the call's own backward frees it."""
    replay = step.replay
    if replay.role[entry] != SAVED:
        return False
    if entry in replay.saved_in:
        savers = replay.saved_in[entry]
        return bool(savers) and all(_is_offloaded(step, fqn) for fqn in savers)
    died = int(replay.died[entry])
    following = replay.births[np.searchsorted(replay.births, call.ends, side="right")]
    return call.begins <= died < int(following)


def _back_beside(step: PlayedStep, call: SavedByCall, entry: int) -> Iterator[tuple[int, int, int]]:
    """What somebody else keeps comes back as a copy for each block inside that saves it, while its backward runs."""
    replay = step.replay
    for fqn in () if _leaves_whole(step, call, entry) else replay.saved_in.get(entry, ()):
        for one in saved_by_calls(replay, (fqn,), stops_early=False) if _is_offloaded(step, fqn) else ():
            if entry in one.inputs and call.first <= one.first and one.end <= call.end:
                yield one.begins, one.ends, int(replay.size[entry])


def _is_offloaded(step: PlayedStep, fqn: str) -> bool:
    return any(is_within(fqn, block) for block in step.offloaded_blocks)


def _needed_from(replay: Replay, entries: Bytes) -> Bytes:
    """When the operation of backward begins that frees each entry: behind the one before it that freed any."""
    saved = np.flatnonzero((replay.role == SAVED) & (replay.died < len(replay.line)))
    freed = np.unique(replay.died[saved])
    freed = freed[replay.phase[freed] != FORWARD]
    births = replay.births[:-1]
    # Of frees without a birth between them all but the first belong to the same operation.
    new = np.append(True, np.searchsorted(births, freed[1:]) > np.searchsorted(births, freed[:-1]))
    last_of_each = np.append(freed[:-1][new[1:]], freed[-1:])
    place = np.searchsorted(last_of_each, replay.died[entries])
    return np.where(place > 0, last_of_each[np.maximum(place - 1, 0)] + 1, 0)


_VIEWS = frozenset(
    {"alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice"}
    | {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"}
    | {"view_as_complex", "view_as_real", "_reshape_alias", "_unsafe_view", "real", "imag"}
)
