"""An offloaded unit inside one that runs again, where nothing moves: it keeps what it saves, as if it were alone.

    outer   |____ a ____ k ____ b ____|     k offloads, on the CPU: autograd asks the innermost unit alone
    forward              kept               where a tensor goes, and with that one it stays where it is
    again   |____ a ____ k ____ b           makes it once more, for as long as it runs

So the outer unit has none of it to bring back: it runs again for the first of its own that backward asks for, and ends
at the last. What it saves itself of the tensors that k keeps is there twice.

Not foreseen: units inside k. Source: torch.autograd.graph.saved_tensors_hooks, whose innermost pair counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from explorer.plan.forecast.replay import FORWARD, SAVED, Replay
from explorer.plan.forecast.saved_by_call import SavedByCall, late_bytes, most_at_once, saved_by_calls
from explorer.plan.memory.series import Bytes
from explorer.plan.names import is_within
from explorer.record.policy import Unit


def kept_by(replay: Replay, unit: Unit) -> Bytes:
    """Entries that calls of the offloaded `unit` save."""
    kept: list[int] = []
    for members in zip(*(replay.calls.get(fqn, ()) for fqn in unit.blocks)):
        made = replay.between(members[0].first, members[-1].end)
        last = np.minimum(replay.died[made], len(replay.line) - 1)
        made = made[(replay.role[made] == SAVED) & (replay.phase[last] != FORWARD)]
        handed = {*members[0].inputs, *members[-1].outputs}
        kept += [entry for entry in made.tolist() if entry not in handed]
        kept += [entry for entry in handed if any(_savers(replay, entry, unit.blocks, ()))]
    return np.unique(np.array(kept, dtype=np.int64))


def without(
    replay: Replay, blocks: Sequence[str], call: SavedByCall, kept: Mapping[Unit, Bytes], *, stops_early: bool
) -> SavedByCall:
    """`call` of the unit of `blocks` with offloaded ones inside, by each of which the entries that it has `kept`."""
    others, theirs = [fqn for unit in kept for fqn in unit.blocks], np.concatenate(list(kept.values()))
    own = ~np.isin(call.entries, theirs)
    entries, leaves = call.entries[own], call.leaves[own]
    saved_outputs = tuple(entry for entry in call.saved_outputs if entry not in theirs)
    inner = np.concatenate((entries[~np.isin(entries, call.outputs)], np.array(saved_outputs, dtype=np.int64)))
    last = int(replay.born[inner].max(initial=call.first))
    if last == call.first:  # nothing is left that would ask for it
        return replace(
            call,
            entries=entries,
            leaves=leaves,
            backs=entries,
            inputs=(),
            late_bytes=0,
            again_bytes=0,
            runs_again=False,
        )
    begins = _asked_at(replay, blocks, call, others, entries)
    until = last if stops_early else call.end
    again = replay.between(call.first, until)
    return replace(
        call,
        entries=entries,
        leaves=leaves,
        backs=np.full(len(entries), begins, dtype=np.int64),
        begins=begins,
        until=until,
        copies=tuple((begins, *twice) for twice in _made_twice(replay, blocks, call, others, theirs)),
        saved_outputs=saved_outputs,
        late_bytes=late_bytes(replay, entries, leaves >= begins, saved_outputs),
        again_bytes=most_at_once(replay.size[again], replay.born[again], replay.died[again]),
    )


def _asked_at(replay: Replay, blocks: Sequence[str], call: SavedByCall, others: Sequence[str], entries: Bytes) -> int:
    """When backward of the call first asks for `entries`, those of `others` being there."""
    births = np.concatenate([replay.born[replay.below(fqn)] for fqn in blocks])
    there = np.concatenate([replay.born[replay.below(fqn)] for fqn in others])
    births = np.setdiff1d(births[(call.begins <= births) & (births <= call.ends)], there)
    return int(births.min(initial=int(replay.died[entries].min(initial=call.ends))))


def _made_twice(
    replay: Replay, blocks: Sequence[str], call: SavedByCall, others: Sequence[str], kept: Bytes
) -> Iterator[tuple[int, int]]:
    """End tick and bytes of what the call makes again and saves, and one of the `others` in it keeps as well."""
    made = kept[(replay.born[kept] > call.first) & (replay.born[kept] <= call.end)]
    for entry in made.tolist():
        for fqn in _savers(replay, entry, blocks, others):
            for one in saved_by_calls(replay, (fqn,), stops_early=False):
                if call.first <= one.first and one.end <= call.end:
                    yield min(one.ends, int(replay.died[entry])), int(replay.size[entry])


def _savers(replay: Replay, entry: int, blocks: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Blocks below `blocks`, and not below `others`, that save the entry."""
    for saver in replay.saved_in.get(entry, ()):
        if any(is_within(saver, fqn) for fqn in blocks) and not any(is_within(saver, fqn) for fqn in others):
            yield saver
