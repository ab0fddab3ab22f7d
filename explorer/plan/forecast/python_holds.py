"""How long forward's own code holds a tensor: what nobody saves for backward is free from then on.

    call of a block     what it makes and does not return is gone when it returns
    what it returns     is gone when the call around it returns, and does not return it in its turn
    in a chain          is gone when the next block, which alone is given it, returns

No code is read for that, only who was called when, with what, and what came back: it may let go earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from explorer.plan.memory.ledger import Bytes
from explorer.record.graph import ModelGraph

NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One forward call of a block. What it allocated is born after `first` and not after `end`."""

    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def handing_on(graph: ModelGraph | None) -> frozenset[str]:
    """Blocks whose output goes to the next one in a chain and to nothing else."""
    return frozenset() if graph is None else frozenset(graph.next_in_turn)


def let_go(
    calls: Mapping[str, Sequence[Call]], used_until: Mapping[int, int], born: Bytes, chained: Collection[str]
) -> Bytes:
    """For every entry the first tick at which forward's code holds it no more; NEVER: it was made outside of blocks."""
    named = [(call, fqn) for fqn, own in calls.items() for call in own]
    named.sort(key=lambda one: (one[0].first, -one[0].end, one[1].count("."), one[1]))  # outer ones first
    order = np.argsort(born, kind="stable")
    births = born[order]
    lets = np.full(len(born), NEVER, dtype=np.int64)
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
                used = used_until.get(entry, NEVER) + 1 if fqn in chained else NEVER
                lets[entry] = min(around, max(used, call.end + 1))
    return lets
