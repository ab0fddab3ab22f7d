"""An offloaded unit inside one that runs again keeps what it saves; the outer one has the rest to bring back."""

from __future__ import annotations

import numpy as np

from explorer.plan.forecast.offload_inside import kept_by, without
from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import saved_by_calls
from explorer.record.policy import Unit
from tests.plan.planners.test_budget import known

GRAPH, RUN = known("gpt")
REPLAY = Replay.of(RUN, GRAPH)
BLOCK = "blocks.1"
MLP = Unit(blocks=(f"{BLOCK}.mlp",), action="offload")


def test_it_keeps_what_it_saves_itself() -> None:
    assert REPLAY is not None
    kept = kept_by(REPLAY, MLP)
    made_inside = np.isin(kept, REPLAY.below(MLP.blocks[0]))
    assert int(REPLAY.size[kept[made_inside]].sum()) == RUN.by_fqn[MLP.blocks[0]].saved_after_forward_bytes
    handed = {entry for call in REPLAY.calls[MLP.blocks[0]] for entry in call.inputs}
    assert set(kept[~made_inside].tolist()) <= handed, "and what it is given, where it saves that"


def test_the_outer_unit_brings_back_all_but_that() -> None:
    assert REPLAY is not None
    (call,) = saved_by_calls(REPLAY, (BLOCK,), stops_early=True)
    kept = kept_by(REPLAY, MLP)
    less = without(REPLAY, (BLOCK,), call, {MLP: kept}, stops_early=True)
    assert set(less.entries.tolist()) == set(call.entries.tolist()) - set(kept.tolist())
    assert less.runs_again and call.begins <= less.begins <= call.ends
    assert less.until <= call.until and less.again_bytes <= call.again_bytes


def test_where_all_is_kept_inside_nothing_asks_the_outer_unit_to_run_again() -> None:
    assert REPLAY is not None
    (call,) = saved_by_calls(REPLAY, (BLOCK,), stops_early=True)
    whole = Unit(blocks=(BLOCK,), action="offload")
    less = without(REPLAY, (BLOCK,), call, {whole: kept_by(REPLAY, whole)}, stops_early=True)
    assert not less.runs_again and not len(less.entries) and less.inputs == () and less.again_bytes == 0
