"""Random policies of every kind that a forecast covers: whole blocks, parts, segments, kept operators."""

from __future__ import annotations

import random
from collections.abc import Sequence

from explorer.plan.names import is_within
from explorer.plan.policy.counted import in_error
from explorer.record import Measurement, ModelGraph, Policy, Unit

KINDS = ("flat", "nested", "segments", "save_ops", "mixed")
_SHAPES = ("flat", "segments")


def random_policy(kind: str, graph: ModelGraph, baseline: Measurement, draw: random.Random) -> Policy:
    """What a hazard forbids is in none; it may be empty."""
    if kind == "nested":
        share = draw.choice((0.2, 0.5, 0.9))
        return Policy.recompute(fqn for fqn in _called(graph) if draw.random() < share)
    if kind in _SHAPES:
        return Policy.recompute(_flat(graph, draw) if kind == "flat" else _segments(graph, draw))
    actions = ("recompute", "save_ops") if kind == "mixed" else (kind,)
    units = random_policy(draw.choice(_SHAPES), graph, baseline, draw).units
    return Policy(units=tuple(_acting(unit, draw.choice(actions), baseline, draw) for unit in units))


def _acting(unit: Unit, action: str, baseline: Measurement, draw: random.Random) -> Unit:
    ops = operators_of(baseline, unit.blocks) if action == "save_ops" else []
    if not ops:
        return unit
    chosen = draw.sample(ops, min(len(ops), draw.randint(1, 3)))
    return Unit(blocks=unit.blocks, action="save_ops", save_ops=tuple(chosen))


def operators_of(baseline: Measurement, blocks: Sequence[str]) -> list[str]:
    """Operators of forward that made something in `blocks` and whose results nobody writes into afterwards."""
    log, end = baseline.allocations, baseline.forward_end_tick
    here = [any(is_within(fqn, block) for block in blocks) for fqn in log.blocks]
    names = {log.ops[op] for op, born, block in zip(log.op, log.born, log.block) if 0 < born <= end and here[block]}
    return sorted(name for name in names if name and not name.split(".")[1].endswith("_") and "empty" not in name)


def _called(graph: ModelGraph) -> list[str]:
    names = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    wrong = {unit[0] for unit in in_error(graph, [(name,) for name in names])}
    return [name for name in names if name not in wrong]


def _flat(graph: ModelGraph, draw: random.Random) -> list[str]:
    share, names = draw.choice((0.2, 0.5, 0.9)), _called(graph)
    draw.shuffle(names)
    chosen: list[str] = []
    for name in names:
        if draw.random() < share and not any(is_within(name, one) or is_within(one, name) for one in chosen):
            chosen.append(name)
    return sorted(chosen)


def _segments(graph: ModelGraph, draw: random.Random) -> list[tuple[str, ...]]:
    following = graph.next_in_turn
    chains = []
    for first in following.keys() - following.values():
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    units: list[tuple[str, ...]] = []
    for chain in sorted(chains, key=lambda chain: (chain[0].count("."), chain[0])):
        while chain:
            n = draw.randint(1, 4)
            part, chain = tuple(chain[:n]), chain[n:]
            within = any(is_within(fqn, other) for fqn in part for unit in units for other in unit)
            if draw.random() < 0.7 and not within:
                units.append(part)
    wrong = in_error(graph, units)
    return [unit for unit in units if unit not in wrong and all(graph.by_fqn[fqn].n_calls for fqn in unit)]
