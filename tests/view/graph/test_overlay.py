"""Bars on blocks: the figure of each, its share of the largest at its depth, and a legend with a unit."""

from __future__ import annotations

import msgspec

from explorer.plan.memory.ledger import ledger
from explorer.record import ModelRef, Policy, RunSpec
from explorer.view.drawing.units import mib
from explorer.view.graph.labels import Facts, labels
from explorer.view.graph.nesting import nest
from explorer.view.graph.overlay import (
    DISTANCE,
    NEEDS,
    OF_RUN,
    QUANTITIES,
    Overlay,
    of_gradients,
    of_prices,
    of_run,
    shares,
)
from tests import graphs

GRAPH = graphs.gpt(6)
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py"), policy=Policy.recompute(["blocks.0"]))
RUN = graphs.measured(GRAPH, SPEC)


def test_every_figure_of_a_run_is_a_share_of_the_largest_at_its_depth() -> None:
    for what in OF_RUN:
        drawn = of_run(what, RUN)
        bars = shares(drawn, nest(GRAPH))
        assert all(0 < bar <= 1 for bar in bars.values())
        assert not bars or 1.0 in bars.values()
    saved = of_run("saved bytes", RUN)
    assert "MiB" in saved.legend and "measured" in saved.legend
    label = labels(Facts(graph=GRAPH, policy=Policy(), overlay=saved))["blocks.1"]
    assert label.heat > 0 and "saved bytes" in label.title and "(measured)" in label.title


def test_a_distance_is_that_of_the_furthest_gradient_below() -> None:
    moved = of_gradients(graphs.compared(GRAPH, SPEC, equal=False))
    last = GRAPH.chain[-1]
    assert moved.figures[last] == moved.figures[""] == 0.01 and moved.figures[GRAPH.chain[0]] == 0
    assert list(shares(moved, nest(GRAPH))) == [last]
    assert NEEDS[DISTANCE] in of_gradients(graphs.compared(GRAPH, SPEC)).legend
    assert NEEDS[DISTANCE] in of_gradients(None).legend


def test_a_price_has_its_unit_and_every_quantity_says_what_it_needs() -> None:
    assert of_prices({"blocks.0": 3.5}).legend.endswith("blocks.0: 3.5 MiB of peak for 1 % of the FLOPs.")
    assert set(NEEDS) == set(QUANTITIES[1:])


def test_the_spoken_name_says_the_figure_of_the_bar() -> None:
    saved = of_run("saved bytes", RUN)
    facts = Facts(graph=GRAPH, policy=Policy(), overlay=saved)
    drawn = labels(facts)
    assert drawn["blocks.1"].bar == f"saved bytes {mib(saved.figures['blocks.1'])} (measured)"
    uneven = Overlay(what="forward time", figures={"blocks.0": 1.0, "blocks.3": 2.5}, unit="ms", origin="measured")
    assert uneven.spoken(nest(GRAPH)["blocks"]) == "forward time at most 2.5 ms each (measured)"
    assert uneven.spoken(nest(GRAPH)["blocks.1"]) == ""
    at_moment = msgspec.structs.replace(facts, alive=ledger(RUN, 3))
    assert not any(label.bar for label in labels(at_moment).values())
