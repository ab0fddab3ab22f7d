"""Few units of a sample model to plan among, every policy of them, and each as a point of the variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from explorer.plan.names import is_within
from explorer.plan.planners.candidates import Named
from explorer.plan.planners.planner import Planner
from explorer.plan.planners.variables import Values, Variables
from explorer.record.policy import Unit
from tests.plan.planners.test_budget import known

Among = list[Named]


OPS = ("aten.addmm.default", "aten.bmm.default")


ATTENTION = ["blocks.0.attention", "blocks.0.attention.dropout", "blocks.0.attention.attention_dropout"]


DEEP: Among = ["blocks.0", *ATTENTION, "blocks.0.mlp", "blocks.1.norm1"]


WIDE: Among = ["blocks.1", "blocks.1.mlp", ("blocks.0", "blocks.1"), ("blocks.1", "blocks.2"), "blocks.2.mlp"]


KEEPING: Among = [
    "blocks.0", "blocks.0.mlp", *(Unit(blocks=(f"blocks.{i}",), action="save_ops", save_ops=OPS[:n])
                                  for i, n in ((0, 1), (0, 2), (1, 2))), "blocks.1", "blocks.2",
]  # fmt: skip


def planner_of(among: Among) -> Planner:
    graph, run = known("gpt")
    return Planner(run, graph, among=among)


def point(variables: Variables, chosen: tuple[int, ...], around: tuple[tuple[int, ...], ...]) -> Values:
    x = np.zeros(variables.n_variables)
    for i in chosen:
        x[variables.number[i, next((o for o in around[i] if o in chosen), None)]] = 1.0
    return x


def policies(planner: Planner) -> Iterator[tuple[int, ...]]:
    """By the planner's own words: no block in two units, no third level inside a second."""
    units, around = planner.candidates.units, planner.candidates.around
    for taken in itertools.product((False, True), repeat=len(units)):
        chosen = tuple(i for i, one in enumerate(taken) if one)
        blocks = [fqn for i in chosen for fqn in units[i].unit.blocks]
        kept = [fqn for i in chosen if units[i].unit.action == "save_ops" for fqn in units[i].unit.blocks]
        if any(is_within(a, b) or is_within(b, a) for a in kept for b in blocks if a != b):
            continue
        if len(blocks) == len(set(blocks)) and all(sum(o in chosen for o in around[i]) <= 1 for i in chosen):
            yield chosen
