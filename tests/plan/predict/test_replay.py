"""A timeline sorted for simulation, and how long forward's code holds a tensor."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.names import is_within
from explorer.plan.predict.replay import BACKWARD, FORWARD, NEVER, Call, Replay, let_go
from explorer.record import Measurement, ModelGraph
from tests.graphs import block
from tests.plan.why.test_peak import graph
from tests.view.builders import Chain, measured, runs


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(0, 60), st.integers(0, 60))
def test_entries_of_a_block_and_between_two_ticks(run: Measurement, first: int, end: int) -> None:
    replay, log = Replay.of(run, None), run.allocations
    assert log is not None
    for fqn in {"layers", *log.blocks} - {""}:
        expected = {i for i, of in enumerate(log.block) if is_within(log.blocks[of], fqn)}
        assert set(replay.below(fqn).tolist()) == expected
    between = replay.between(first, end)
    assert set(between.tolist()) == {i for i, born in enumerate(log.born) if first < born <= end}
    assert (np.diff(replay.born[between]) >= 0).all(), "in order of birth"
    assert set(replay.results[:-1].tolist()) == {born for born, role in zip(log.born, log.role) if role != 8}, (
        "8 is unattributed: no operator returned it"
    )


def test_phases_end_where_the_next_begins() -> None:
    run = measured(Chain(n_blocks=2))
    replay = Replay.of(run, None)
    spans = {span.phase: span for span in run.phases}
    backward = spans["backward"]
    assert replay.phase[backward.end_tick - 1] == BACKWARD != replay.phase[backward.end_tick]
    last = replay.forward_ends(spans["forward"].first_tick) - 1
    assert replay.phase[last] == FORWARD and last in replay.births


def test_bytes_born_in_calls_of_a_block() -> None:
    chain = Chain(n_blocks=2)
    replay = Replay.of(measured(chain), None)
    every = np.arange(len(replay.size))
    assert replay.born_in("layers.0", every) == chain.scratch + chain.saved + chain.output
    assert replay.born_in("layers.0.inner", every) == chain.saved
    assert replay.born_in("elsewhere", every) == 0


def test_who_saves_an_entry_is_taken_from_the_graph_where_its_calls_have_as_many() -> None:
    run = measured(Chain(n_blocks=2))
    blocks = (
        block("layers.0", "B", inputs_saved_in=(("layers.0",),), outputs_saved_in=(("layers.1", ""),)),
        block("layers.1", "B", outputs_saved_in=((), ())),
    )
    replay = Replay.of(run, ModelGraph(model=graph().model, blocks=blocks, edges=()))
    (one,), (two,) = replay.calls["layers.0"], replay.calls["layers.1"]
    assert replay.saved_in == {one.inputs[0]: ("layers.0",), one.outputs[0]: ("layers.1", "")}
    assert two.inputs == one.outputs


# tick 1: x, outside of blocks. outer runs from tick 1 to 9 and calls one (ticks 2 to 5) and two (ticks 6 to 8).
#   one makes h at 3 and returns y, made at 4; two is given y, makes z at 7 and returns it; outer returns z.
X, H, Y, Z = range(4)
BORN = np.array([1, 3, 4, 7], dtype=np.int64)
CALLS = {
    "outer": [Call(first=1, end=9, inputs=(X,), outputs=(Z,))],
    "outer.one": [Call(first=2, end=5, inputs=(X,), outputs=(Y,))],
    "outer.two": [Call(first=5, end=8, inputs=(Y,), outputs=(Z,))],
}
USED = {X: 9, Y: 8}


def test_what_is_made_is_gone_with_its_call_and_what_is_returned_with_the_call_around() -> None:
    x, h, y, z = let_go(CALLS, USED, BORN, ()).tolist()
    assert x == NEVER, "made outside of blocks"
    assert (h, y) == (5 + 1, 9 + 1)
    assert z == NEVER, "outer returns it to nobody that is known"


def test_in_a_chain_an_output_is_gone_when_the_block_that_alone_is_given_it_returns() -> None:
    assert let_go(CALLS, USED, BORN, ("outer.one",)).tolist() == [NEVER, 6, 8 + 1, NEVER]


def test_an_output_that_nobody_is_given_stays_to_the_end_of_the_call_around() -> None:
    assert let_go(CALLS, {}, BORN, ("outer.one",))[Y] == 9 + 1
