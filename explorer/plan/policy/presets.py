"""Policies by name, and policies that need ever less memory. Both count the units of counted.py.

Presets recompute what is worth it and what no hazard forbids. The ladder is for a step whose baseline does not fit:

all         every block that presets count: the inputs of blocks stay, one block at a time is whole
nested      and the blocks inside and around them: of a whole block only one part at a time is there
everything  and every block at every depth that saves anything at all
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.hazards.hazards import hazards
from explorer.plan.names import Fqns, products_kept
from explorer.plan.policy.counted import counted_units, runs, segments
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.policy import KEEP_ALL, Policy, Unit


class Preset(Record):
    """A policy that one name means on every model. A new one is a row of PRESETS: command line and page offer it."""

    name: str
    title: str
    """In the menu of the page."""
    help: str
    choose: Callable[[ModelGraph], Policy]
    family: tuple[tuple[str, str], ...] = ()
    """Names of its kin that the menu offers too, each with its title."""


_EVERY = re.compile(r"every-([1-9]\d{0,5})")
"""Works for every number, also those that no menu offers."""


def _every(graph: ModelGraph, k: int) -> Policy:
    return _policy(_counted(graph)[::k])


_ROWS = (
    Preset(
        name="keep-all",
        title="Keep all",
        help="Recompute nothing: the baseline.",
        choose=lambda graph: KEEP_ALL,
    ),
    Preset(
        name="all",
        title="Recompute all",
        help="Recompute every block: the least memory that blocks by themselves can give.",
        choose=lambda graph: _policy(_counted(graph)),
    ),
    Preset(
        name="every-2",
        title="Every second",
        help="Recompute every second block, the first one included; every-3, every-4, ... likewise.",
        choose=lambda graph: _every(graph, 2),
        family=(("every-3", "Every third"), ("every-4", "Every fourth")),
    ),
    Preset(
        name="sqrt",
        title="Segments of √n blocks",
        help="Keep about sqrt(n) of n blocks. In a Sequential: sqrt(n) segments of consecutive blocks, each of which "
        "keeps only its input. Elsewhere, where blocks cannot be joined: sqrt(n) evenly spread blocks stay as they "
        "are.",
        choose=lambda graph: _policy(_sqrt(_counted(graph), graph)),
    ),
    Preset(
        name="except-last",
        title="All but the last",
        help="Recompute every block but the last, which backward needs at once: keeping it is nearly free.",
        choose=lambda graph: _policy(_counted(graph)[:-1]),
    ),
    Preset(
        name="keep-products",
        title="Keep matrix products",
        help="Recompute every block, but keep what its matrix products, attentions and convolutions return: "
        "they do not run twice, and their results stay. torch then looks at every operator in Python, which takes time "
        "where operators are small.",
        choose=lambda graph: Policy(units=tuple(products_kept(unit, graph) for unit in _counted(graph))),
    ),
)
PRESETS = {row.name: row for row in _ROWS}


def preset(name: str, graph: ModelGraph) -> Policy:
    """The policy that `name` means on `graph`. Raises InvalidPolicy for an unknown name."""
    if name in PRESETS:
        return PRESETS[name].choose(graph)
    if every := _EVERY.fullmatch(name):
        return _every(graph, int(every[1]))
    raise InvalidPolicy(
        f"There is no preset {name}.",
        hint=nearest(name, PRESETS) or f"There are {', '.join(PRESETS)}; or give a policy file.",
    )


def preset_titles() -> dict[str, str]:
    """Names and titles for a menu."""
    return {name: title for row in PRESETS.values() for name, title in ((row.name, row.title), *row.family)}


def is_preset(name: str) -> bool:
    """True if `preset` knows the name."""
    return name in PRESETS or _EVERY.fullmatch(name) is not None


def _counted(graph: ModelGraph) -> tuple[Fqns, ...]:
    units = counted_units(graph)
    if not units and graph.blocks:
        raise InvalidPolicy(
            f"No block of {graph.model.target} is one to recompute by itself: each is a single operation, which keeps "
            "its input, or is frozen and saves nothing, or a hazard forbids it.",
            hint="Gather operations into modules or an nn.Sequential; `check` names hazards of blocks chosen by hand.",
        )
    return units


def _policy(units: Iterable[Fqns]) -> Policy:
    return Policy(units=tuple(Unit(blocks=unit) for unit in units))


def _sqrt(units: tuple[Fqns, ...], graph: ModelGraph) -> tuple[Fqns, ...]:
    stretches = runs(units, graph)
    if any(len(stretch) > 1 or len(stretch[0]) > 1 for stretch in stretches):
        # Units of several blocks are stretches of a Sequential already.
        joined: list[Fqns] = []
        for stretch in stretches:
            is_of_blocks = len(max(stretch, key=len)) == 1
            joined += segments([*chain(*stretch)], graph) if is_of_blocks else stretch
        return tuple(joined)
    n_kept = round(math.sqrt(len(units)))
    # The last block of each stretch is kept, so that the very last one, which backward needs at once, is among them.
    not_recomputed = {round((i + 1) * len(units) / n_kept) - 1 for i in range(n_kept)}
    return tuple(unit for i, unit in enumerate(units) if i not in not_recomputed)


def ladder(graph: ModelGraph) -> Iterator[tuple[str, Policy]]:
    """The policy of each rung, and its units in words. No rung recomputes a unit that a hazard forbids."""
    try:
        every = preset("all", graph)
    except InvalidPolicy:  # no block is worth recomputing by itself
        every = Policy()
    rungs = [("every block", every)]
    saving = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    parents = [fqn for fqn in saving if graph.children[fqn]]
    for name, blocks in (("blocks inside blocks", parents), ("every block at every depth", saving)):
        policy = Policy.recompute(dict.fromkeys([*every.blocks, *blocks]))
        wrong = {fqn for hazard in hazards(graph, policy) if hazard.severity == "error" for fqn in hazard.blocks}
        rungs.append((name, Policy.recompute(fqn for fqn in policy.blocks if fqn not in wrong)))
    before = Policy()
    for name, policy in rungs:
        if len(policy.blocks) > len(before.blocks):
            yield name, policy
            before = policy
