"""Measured sample models for planners: few units to plan among, every policy of them, and units one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.names import is_within
from explorer.plan.planners.candidates import Named
from explorer.plan.planners.planner import Planner
from explorer.plan.planners.variables import Values, Variables
from explorer.record import Measurement, ModelGraph, ModelRef, RunSpec
from explorer.record.policy import Unit
from tests.graphs import block, graph_of
from tests.view.builders import MIB, Book, Chain, measured

SMALL = {
    "mlp": {"n_layers": 5, "width": 64, "batch": 512},
    "gpt": {"n_layers": 3, "batch": 2, "width": 64, "length": 64, "vocabulary": 256},
    "gpt12": {"n_layers": 12, "batch": 1, "width": 32, "length": 32, "vocabulary": 64},
    "unet": {"batch": 2, "width": 8},
}


@cache
def graph_and_run(sample: str) -> tuple[ModelGraph, Measurement]:
    target = f"sample_models/{sample.rstrip('0123456789')}.py"
    model = ModelRef(target=target, size="small", arguments=dict(SMALL[sample]))
    return describe(model), measure(RunSpec(model=model, n_repeats=1))


@cache
def planner(sample: str) -> Planner:
    graph, run = graph_and_run(sample)
    return Planner(run, graph)


def line_of(chain: Chain) -> tuple[ModelGraph, Measurement]:
    names = [f"layers.{i}" for i in range(chain.n_blocks)]
    blocks = [block("", "M"), block("layers", "ModuleList", n_calls=0)]
    blocks += [block(name, "B", forward_flops=100, rerun_flops=100) for name in names]
    return graph_of(*blocks, chain=tuple(names)), measured(chain)


def encoder(*, own_outputs: bool = False) -> tuple[ModelGraph, Measurement]:
    """Six layers of two parts in a block of their own, and a head that takes as much as all their inputs.

    With `own_outputs` the graph says that only the first part of a layer saves what this part returns.
    """
    book, saved, names = Book(), [], ["encoder"]
    given = value = book.hold("input", "", 2 * MIB)
    book.phase("forward")
    begin = book.tick
    book.free(book.alloc("temporary", "encoder", 4))
    for layer in range(6):
        entered, first = value, book.tick
        book.free(book.alloc("temporary", f"encoder.{layer}", 4))
        names += [f"encoder.{layer}", f"encoder.{layer}.a", f"encoder.{layer}.b"]
        for part in names[-2:]:
            before, start = value, book.tick
            kept = book.alloc("saved activation", part, 8 * MIB)
            value = book.alloc("saved activation", part, 2 * MIB, "aten::tanh")
            book.calls.append((part, start, book.tick, (before,), (value,)))
            saved.append((part, kept, value))
        book.calls.append((f"encoder.{layer}", first, book.tick, (entered,), (value,)))
    book.calls.append(("encoder", begin, book.tick, (given,), (value,)))
    book.phase("backward")
    gradient = book.alloc("temporary", "", 2 * MIB)
    book.free(book.alloc("temporary", "", 14 * MIB))
    for part, kept, value in reversed(saved):
        before = book.alloc("temporary", part, 2 * MIB)
        for entry in (gradient, value, kept):
            book.free(entry)
        gradient = before
    book.free(gradient)
    figures = {"forward_flops": 100, "rerun_flops": 100}
    blocks = [block("", "M"), *(block(name, "B", **figures) for name in names)]
    if own_outputs:
        flags = {name: (False,) for name in names if name.endswith(".a")}
        blocks = [msgspec.structs.replace(one, outputs_saved_outside=flags.get(one.fqn, ())) for one in blocks]
    run = msgspec.structs.replace(measured(), allocations=book.close(), phases=tuple(book.spans), blocks=())
    return graph_of(*blocks), run


Among = list[Named]
OPS = ("aten.addmm.default", "aten.bmm.default")
ATTENTION = ["blocks.0.attention", "blocks.0.attention.dropout", "blocks.0.attention.attention_dropout"]
DEEP: Among = ["blocks.0", *ATTENTION, "blocks.0.mlp", "blocks.1.norm1"]
PARTS: Among = ["encoder", "encoder.0", "encoder.0.a", "encoder.1", "encoder.1.a", "encoder.1.b", "encoder.5.b"]
UNEQUAL: Among = ["down.0", "down.0.block", "down.1", "down.2.block", "middle", "up.1", "up.1.block"]
WIDE: Among = ["blocks.1", "blocks.1.mlp", ("blocks.0", "blocks.1"), ("blocks.1", "blocks.2"), "blocks.2.mlp"]
KEEPING: Among = [
    "blocks.0", "blocks.0.mlp", *(Unit(blocks=(f"blocks.{i}",), action="save_ops", save_ops=OPS[:n])
                                  for i, n in ((0, 1), (0, 2), (1, 2))), "blocks.1", "blocks.2",
]  # fmt: skip


def planner_of(among: Among) -> Planner:
    graph, run = graph_and_run("gpt")
    return Planner(run, graph, among=among)


def point(variables: Variables, chosen: tuple[int, ...], around: tuple[tuple[int, ...], ...]) -> Values:
    x = np.zeros(variables.n_variables)
    for i in chosen:
        x[variables.number[i, next((o for o in around[i] if o in chosen), None)]] = 1.0
    return variables.with_shared(x)


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
