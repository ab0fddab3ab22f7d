"""Policies by name. They count the blocks of `graph.repeats`: the repeated layers, else what the model consists of."""

from __future__ import annotations

import math
import re

from explorer.errors import InvalidPolicy, nearest
from explorer.record.graph import ModelGraph
from explorer.record.policy import KEEP_ALL, Policy, Unit

PRESETS: dict[str, str] = {
    "keep-all": "Recompute nothing: the baseline.",
    "all": "Recompute every block: the least memory that blocks by themselves can give.",
    "every-2": "Recompute every second block, the first one included; every-3, every-4, ... likewise.",
    "sqrt": "Keep about sqrt(n) of n blocks. In a Sequential: sqrt(n) segments of consecutive blocks, each of which "
    "keeps its input alone. Elsewhere, where blocks cannot be joined: sqrt(n) evenly spread blocks stay as they are.",
    "except-last": "Recompute every block but the last, which backward needs at once: keeping it is nearly free.",
}
"""Name and meaning. `every-K` works for every K from 1 on."""

_EVERY = re.compile(r"every-([1-9]\d{0,5})")


def preset(name: str, graph: ModelGraph) -> Policy:
    """The policy that `name` means on `graph`. Raises InvalidPolicy for an unknown name."""
    blocks = counted_blocks(graph)
    if every := _EVERY.fullmatch(name):
        return Policy.recompute(blocks[:: int(every[1])])
    match name:
        case "keep-all":
            return KEEP_ALL
        case "all":
            return Policy.recompute(blocks)
        case "except-last":
            return Policy.recompute(blocks[:-1])
        case "sqrt":
            return Policy(units=_sqrt(blocks, graph))
    raise InvalidPolicy(
        f"There is no preset {name}.",
        hint=nearest(name, PRESETS) or f"There are {', '.join(PRESETS)}; or give a policy file.",
    )


def is_preset(name: str) -> bool:
    """Whether `preset` knows the name."""
    return name in PRESETS or _EVERY.fullmatch(name) is not None


def counted_blocks(graph: ModelGraph) -> tuple[str, ...]:
    """The blocks that presets count, in order; those that were never called are left out."""
    return tuple(fqn for fqn in graph.repeats if graph.by_fqn[fqn].n_calls > 0)


def _sqrt(blocks: tuple[str, ...], graph: ModelGraph) -> tuple[Unit, ...]:
    n_kept = round(math.sqrt(len(blocks)))
    if _can_be_joined(blocks, graph):
        borders = [round(i * len(blocks) / n_kept) for i in range(n_kept + 1)] if n_kept else []
        return tuple(Unit(blocks=blocks[first:end]) for first, end in zip(borders, borders[1:]))
    # The last block of each stretch is kept, so that the very last one, which backward needs at once, is among them.
    kept = {round((i + 1) * len(blocks) / n_kept) - 1 for i in range(n_kept)}
    return tuple(Unit(blocks=(fqn,)) for i, fqn in enumerate(blocks) if i not in kept)


def _can_be_joined(blocks: tuple[str, ...], graph: ModelGraph) -> bool:
    """Consecutive children of one Sequential: only there does one block feed the next and nothing else."""
    parents = {graph.by_fqn[fqn].parent for fqn in blocks}
    if len(parents) != 1 or (parent := parents.pop()) is None or graph.by_fqn[parent].kind != "Sequential":
        return False
    siblings = [block.fqn for block in graph.children[parent]]
    first = siblings.index(blocks[0])
    return tuple(siblings[first : first + len(blocks)]) == blocks
