"""Calls of a unit under its action: recompute, or recompute with the results of some operators kept (save_ops).

save_ops    The results of the named operators stay from forward on, whether backward needs them or not. The rerun gets
            them back and allocates nothing for these operators. A result that the rerun asks for then lives as it did
            in forward. A result behind the point where the rerun stops stays until backward of the call has ended.

Not predicted: kept operators inside another unit or around one, reentrant checkpointing, offload; see unforeseen.py.
Source: torch.utils.checkpoint (_CachedTorchDispatchMode).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from explorer.plan.forecast.replay import SAVED, UNATTRIBUTED, Replay
from explorer.plan.forecast.rerun_flops import run_again
from explorer.plan.forecast.saved_by_call import SavedByCall, late_bytes, most_at_once, saved_by_calls
from explorer.plan.memory.ledger import Mask
from explorer.plan.names import is_within, operator_word
from explorer.record.allocations import ROLES
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

BUFFER = ROLES.index("buffer")
FOREVER = 2**62
COUNTER_BYTES = 8
"""num_batches_tracked, with which no norm computes."""


def calls_of(
    replay: Replay, graph: ModelGraph | None, unit: Unit, policy: Policy, inside: Collection[str] = ()
) -> list[SavedByCall]:
    """Calls of `unit` under its action and the options of `policy`; `inside` are the blocks of the units in it."""
    if not run_again(graph, unit.blocks, policy):
        return []  # a checkpoint around what saves nothing is gone when forward returns
    calls = saved_by_calls(replay, unit.blocks, stops_early=policy.stops_early)
    if unit.action == "save_ops":
        calls = [_with_results(replay, call, unit.save_ops) for call in calls]
    if policy.running_stats == "once" and graph is not None:
        norms = _norms_below(graph, unit.blocks)
        calls = [_with_statistics(replay, norms, call, inside) for call in calls]
    return calls


def _with_statistics(replay: Replay, norms: Sequence[str], call: SavedByCall, inside: Collection[str]) -> SavedByCall:
    """A rerun moves copies of running statistics. The copies that a norm computes with live until its backward."""
    copies, n_bytes = list(call.copies), 0
    for fqn in norms:
        own = replay.below(fqn)
        sizes = [int(size) for size in replay.size[own[replay.role[own] == BUFFER]]]
        saved = own[(replay.role[own] == SAVED) & (replay.born[own] > call.first) & (replay.born[own] <= call.end)]
        n_bytes += sum(sizes)
        if len(saved) and not any(is_within(fqn, other) for other in inside):
            until = int(replay.died[saved].max())
            copies += [(call.begins, until, size) for size in sizes if size > COUNTER_BYTES]
    again_bytes = call.again_bytes + n_bytes
    return replace(call, copies=tuple(copies), again_bytes=again_bytes, statistics_bytes=n_bytes) if n_bytes else call


def _norms_below(graph: ModelGraph, blocks: Sequence[str]) -> list[str]:
    """Norms with running statistics in `blocks`."""
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
        held=tuple(zip(results.tolist(), replay.born[results].tolist(), stays.tolist())),
        saved_outputs=saved_outputs,
        late_bytes=late_bytes(replay, entries, leaves >= call.begins, saved_outputs),
        again_bytes=_again_without(replay, call, of_these),
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


_VIEWS = frozenset(
    {"alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice"}
    | {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"}
    | {"view_as_complex", "view_as_real", "_reshape_alias", "_unsafe_view", "real", "imag"}
)
