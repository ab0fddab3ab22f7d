"""The ticks at which backward of each call of a unit allocates: the first is where a rerun of the call begins.

Apart from calls.py, which says what each call saves: here the calls of one block are told apart in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from explorer.plan.memory.ledger import Bytes
from explorer.plan.names import is_within
from explorer.plan.predict.replay import BACKWARD, FORWARD, RECOMPUTE, SAVED, Call, Replay
from explorer.record.allocations import ROLES

GRADIENT = ROLES.index("gradient")
CAST = "aten._to_copy.default"


def first_read(replay: Replay, births: Bytes) -> int | None:
    """The first of these ticks of backward at which a saved tensor may be read: a cast of the gradient reads none."""
    if not len(births):
        return None
    ops = replay.op[replay.by_birth[np.searchsorted(replay.births, births)]]
    is_cast = np.isin(ops, [i for i, name in enumerate(replay.ops) if name == CAST])
    return int(births[is_cast.argmin()])


def births_of_backward(replay: Replay, unit: Sequence[str], calls: Sequence[Sequence[Call]]) -> list[Bytes]:
    """Ticks at which backward of each call allocates inside the unit.

    The array of a call is empty if several calls precede the allocations: the timeline cannot assign them to a call.
    """
    if not calls:
        return []
    births = np.concatenate([_births_below(replay, fqn) for fqn in unit])
    births = np.sort(births[births > calls[0][-1].end])
    places = np.searchsorted(births, [members[0].first for members in calls]).tolist()
    ends = [*places[1:], len(births)]
    if len(calls) > 1 and set(places) == {0}:
        return _of_calls_in_reverse(replay, calls, births)
    return [births[place:end] if places.count(place) == 1 else births[:0] for place, end in zip(places, ends)]


def _of_calls_in_reverse(replay: Replay, calls: Sequence[Sequence[Call]], births: Bytes) -> list[Bytes]:
    """`births` by call, if backward of each call is over before that of the call in front; else empty arrays.

    Backward of a call ends when the last tensor that it saves dies. Births of gradients are left out: a gradient may
    be made after that.
    """
    parts: list[Bytes] = []
    made = replay.by_birth[np.searchsorted(replay.births, births)]
    births = births[replay.role[made] != GRADIENT]
    over = 0
    for members in reversed(calls):
        saved = replay.between(members[0].first, members[-1].end)
        died = replay.died[saved[replay.role[saved] == SAVED]]
        died = died[replay.phase[np.minimum(died, len(replay.line) - 1)] != FORWARD]
        if not len(died) or died.min() < over:
            return [births[:0] for _ in calls]
        parts.insert(0, births[(births > over) & (births <= died.max())])
        over = int(died.max())
    return parts


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
