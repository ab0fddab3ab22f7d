"""Policies by name. They count the units of counted.py: what is worth recomputing and no hazard forbids."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.policy.counted import Fqns, counted_units, runs, segments
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
    if name == "keep-all":
        return KEEP_ALL
    every = _EVERY.fullmatch(name)
    if every or name in PRESETS:
        units = _counted(graph)
        if every:
            return _policy(units[:: int(every[1])])
        match name:
            case "all":
                return _policy(units)
            case "except-last":
                return _policy(units[:-1])
            case "sqrt":
                return _policy(_sqrt(units, graph))
    raise InvalidPolicy(
        f"There is no preset {name}.",
        hint=nearest(name, PRESETS) or f"There are {', '.join(PRESETS)}; or give a policy file.",
    )


def is_preset(name: str) -> bool:
    """Whether `preset` knows the name."""
    return name in PRESETS or _EVERY.fullmatch(name) is not None


def _counted(graph: ModelGraph) -> tuple[Fqns, ...]:
    units = counted_units(graph)
    if not units and graph.blocks:
        raise InvalidPolicy(
            f"No block of {graph.model.target} is one to recompute by itself: each is a single operation, which keeps "
            "its input, or a hazard forbids it.",
            hint="Gather operations into modules or an nn.Sequential; `check` names hazards of blocks chosen by hand.",
        )
    return units


def _policy(units: Iterable[Fqns]) -> Policy:
    return Policy(units=tuple(Unit(blocks=unit) for unit in units))


def _sqrt(units: tuple[Fqns, ...], graph: ModelGraph) -> tuple[Fqns, ...]:
    stretches = runs(units, graph)
    if any(len(stretch) > 1 for stretch in stretches):
        joined = (_joined(stretch, graph) for stretch in stretches)
        return tuple(unit for stretch in joined for unit in stretch)
    n_kept = round(math.sqrt(len(units)))
    # The last block of each stretch is kept, so that the very last one, which backward needs at once, is among them.
    kept = {round((i + 1) * len(units) / n_kept) - 1 for i in range(n_kept)}
    return tuple(unit for i, unit in enumerate(units) if i not in kept)


def _joined(stretch: Sequence[Fqns], graph: ModelGraph) -> Sequence[Fqns]:
    """Units of several blocks are stretches of a Sequential already."""
    lone = all(len(unit) == 1 for unit in stretch)
    return segments([unit[0] for unit in stretch], graph) if lone else stretch
