"""Bytes of each block by the timeline: what is saved when forward ends, and what is there at the peak."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.plan.forecast.block_bytes import with_bytes
from explorer.plan.memory.ledger import alive, array_of, belongs, peak_tick
from tests import graphs
from tests.six_layers import GRAPH, SPEC
from tests.timelines import alive_at


def test_a_block_has_what_lies_in_it_and_below() -> None:
    run = graphs.measured(GRAPH, SPEC)
    log = run.allocations
    assert log is not None
    blank = tuple(replace(cost, saved_after_forward_bytes=-1, at_peak_bytes=-1) for cost in run.blocks)
    by_fqn = {cost.fqn: cost for cost in with_bytes(run, blank)}
    assert by_fqn[""].at_peak_bytes == run.step_peak_bytes
    assert by_fqn[""].saved_after_forward_bytes == run.saved_after_forward_bytes
    there = alive_at(log, log.peak_tick)
    assert there == alive(log, peak_tick(log)).tolist()
    for fqn, cost in by_fqn.items():
        inside = belongs(log, fqn)
        assert cost.at_peak_bytes == sum(int(array_of(log.n_bytes)[i]) for i in there if inside[i])


def test_what_was_measured_otherwise_stays() -> None:
    run = graphs.measured(GRAPH, SPEC)
    for before, after in zip(run.blocks, with_bytes(run, run.blocks)):
        assert (before.fqn, before.forward_flops, before.n_recompute) == (
            after.fqn,
            after.forward_flops,
            after.n_recompute,
        )
