"""Why memory was refused: what was held and by whom, and what would have fitted as far as that can be known."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.plan.planners.confirm import refusal
from explorer.record import Failure, RunSpec
from tests import graphs
from tests.graphs import GRAPH
from tests.view.builders import cut

WHOLE = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
FULL = Failure(kind="out of memory", sentence="full", asked_bytes=2**20, free_bytes=0)
assert WHOLE.forward_end_tick is not None
REFUSED = replace(cut(WHOLE, WHOLE.forward_end_tick), failure=FULL, graph=GRAPH)


def test_a_run_that_was_not_refused_says_nothing() -> None:
    assert refusal(WHOLE) == () and refusal(replace(REFUSED, allocations=None)) == ()


def test_without_a_whole_step_it_says_what_recomputing_would_free() -> None:
    held, could = refusal(REFUSED)
    assert held.startswith("Held then: ") and "of it" in held
    assert could.startswith("Saved activations of blocks.0") and "hold " in could
    assert "Record a step that fits" in refusal(replace(REFUSED, graph=None))[1]


def test_with_a_whole_step_it_says_what_there_was_room_for() -> None:
    _, fits = refusal(REFUSED, WHOLE)
    assert fits.startswith("There was room for ") and "an earlier step held 104.5 MiB" in fits
    room = replace(REFUSED, failure=replace(FULL, free_bytes=2**40))
    assert "this step is larger" in refusal(room, replace(WHOLE, graph=GRAPH))[1]
