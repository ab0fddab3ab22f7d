"""A timeline sorted for replay finds by block and by tick what a scan of all entries finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.forecast.replay import BACKWARD, FORWARD, Replay
from explorer.plan.names import is_within
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
