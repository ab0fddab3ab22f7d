"""What changes a line, summed tick by tick; and who is held at a tick of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.forecast.changes import changes_of, held_at, line_with, offsets_of
from explorer.plan.forecast.nesting import flat
from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import saved_by_calls
from tests.view.builders import Chain, measured

ticks = st.integers(0, 12)


@given(st.lists(st.tuples(ticks, ticks, st.integers(-(2**40), 2**40)), max_size=12), st.integers(1, 10))
def test_offsets_are_the_sum_of_all_changes_at_each_tick(changes: list[tuple[int, int, int]], length: int) -> None:
    bounds, offsets = offsets_of(np.array(changes, dtype=np.int64).reshape(-1, 3).T, length)
    line = np.repeat(offsets, np.diff(np.append(bounds, length)))
    assert bounds[0] == 0 and line.tolist() == [
        sum(size for first, end, size in changes if first <= tick < end) for tick in range(length)
    ]


@settings(max_examples=25, deadline=None)
@given(st.builds(Chain, n_blocks=st.integers(1, 4)), st.sets(st.integers(0, 3)))
def test_what_is_held_adds_up_to_the_line_but_for_reruns(chain: Chain, taken: set[int]) -> None:
    replay = Replay.of(run := measured(chain), None)
    calls = [
        call for i in sorted(taken) if i < chain.n_blocks
        for call in saved_by_calls(replay, (f"layers.{i}",), stops_early=True)
    ]  # fmt: skip
    nest = flat(calls)
    played = changes_of(replay, nest, run.forward_end_tick, stash_bytes=0)
    line = line_with(replay, played, nest, stash_bytes=0)
    again = {max(call.begins - 1, 0) for call in calls}
    for tick in range(len(line)):
        held = int(replay.size[held_at(replay, played, tick)].sum())
        assert held == line[tick] or (tick in again and held < line[tick])
