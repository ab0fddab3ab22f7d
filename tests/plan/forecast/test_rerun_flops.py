"""FLOPs of a rerun: early stop, units inside, results that are kept."""

from __future__ import annotations

from explorer.plan.forecast.rerun_flops import rerun_flops, stops_inside, unit_flops
from explorer.record import Block, ModelGraph, Policy, Unit
from tests.graphs import block
from tests.plan.why.test_peak import graph
from tests.view.builders import Chain, measured

FLOPS = Chain().flops
RUN = measured()
PLAIN, WHOLE = Policy(), Policy(early_stop=False)


def of(*blocks: Block) -> ModelGraph:
    return ModelGraph(model=graph().model, blocks=blocks, edges=())


HALF = of(block("layers.1", "B", forward_flops=200, rerun_flops=100, last_saved_in="layers.1.inner"))


def test_only_the_last_block_of_a_segment_stops_early() -> None:
    assert rerun_flops(RUN, HALF, ("layers.0", "layers.1"), PLAIN) == FLOPS + FLOPS // 2
    assert rerun_flops(RUN, HALF, ("layers.1", "layers.0"), PLAIN) == 2 * FLOPS
    assert rerun_flops(RUN, HALF, ("layers.0", "layers.1"), WHOLE) == 2 * FLOPS
    assert rerun_flops(RUN, None, ("layers.1",), PLAIN) == FLOPS


def test_a_segment_stops_in_its_last_block_that_saves_and_a_unit_that_saves_nothing_never_runs_again() -> None:
    graph = of(*HALF.blocks, block("layers.2", "Dropout"))
    assert rerun_flops(RUN, graph, ("layers.0", "layers.1", "layers.2"), PLAIN) == FLOPS + FLOPS // 2
    assert rerun_flops(RUN, graph, ("layers.0", "layers.1", "layers.2"), WHOLE) == 3 * FLOPS
    assert rerun_flops(RUN, graph, ("layers.2",), PLAIN) == rerun_flops(RUN, graph, ("layers.2",), WHOLE) == 0
    assert rerun_flops(RUN, graph, ("layers.2",), Policy(use_reentrant=True)) == FLOPS
    assert stops_inside(graph, Unit(blocks=("layers.1", "layers.2")), Unit(blocks=("layers.1.inner",)))


def test_a_rerun_that_ends_in_a_unit_inside_leaves_that_to_it() -> None:
    outer, inner = Unit(blocks=("layers.1",)), Unit(blocks=("layers.1.inner",))
    other = Unit(blocks=("layers.1.other",))
    assert stops_inside(HALF, outer, inner) and not stops_inside(HALF, outer, other)
    assert not stops_inside(None, outer, inner)
    alone = unit_flops(RUN, HALF, outer, [], PLAIN)
    assert alone == unit_flops(RUN, HALF, outer, [other], PLAIN) == FLOPS // 2
    within = unit_flops(RUN, HALF, outer, [inner], PLAIN)
    assert within is not None and within < alone
    assert unit_flops(RUN, HALF, outer, [inner], WHOLE) == FLOPS


def test_flops_of_kept_results_are_unknown_where_nobody_saw_the_operators() -> None:
    unit = Unit(blocks=("layers.1",), action="save_ops", save_ops=("aten.mm.default",))
    assert unit_flops(RUN, HALF, unit, [], PLAIN) is None
    seen = of(block("layers.1", "B", forward_flops=200, rerun_flops=200, op_flops={"aten.mm.default": 150}))
    assert unit_flops(RUN, seen, unit, [], PLAIN) == FLOPS // 4
