"""Blocks by number, for targets that count transformer layers: `decoder.layers.3` is layer 3 of `decoder.layers`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from explorer.record.run import PipelinePlan


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that a policy names, all of one list of the model."""

    parent: str
    chosen: tuple[int, ...]

    def name(self, number: int) -> str:
        return f"{self.parent}.{number}"

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(map(self.name, numbers))

    def stages(self, plan: PipelinePlan) -> list[list[int]]:
        """Numbers of the layers in each stage."""
        return [[number for number in map(self._number, blocks) if number is not None] for blocks in plan.stages]

    def _number(self, fqn: str) -> int | None:
        parent, _, own = fqn.rpartition(".")
        return int(own) if parent == self.parent and own.isdecimal() else None


def layers_of(blocks: Iterable[str]) -> Layers | str:
    """A sentence where they are no layers of one list."""
    split = {fqn: fqn.rpartition(".") for fqn in blocks}
    other = [fqn for fqn, (_, _, own) in split.items() if not own.isdecimal()]
    if other:
        return f"{other[0]} is no numbered layer, and only whole layers can be named there."
    parents = sorted({parent for parent, _, _ in split.values()})
    if len(parents) > 1:
        return f"Layers of {' and of '.join(parents)} are chosen, and only one list of layers is counted there."
    if not parents:
        return "The policy recomputes nothing."
    return Layers(parent=parents[0], chosen=tuple(sorted(int(own) for _, _, own in split.values())))


def fullest_list(plan: PipelinePlan) -> Layers | None:
    """The list of the model with most numbered blocks in the stages: its transformer layers. None: it has none."""
    numbered: dict[str, int] = {}
    for fqn in (fqn for blocks in plan.stages for fqn in blocks):
        parent, _, own = fqn.rpartition(".")
        if own.isdecimal():
            numbered[parent] = numbered.get(parent, 0) + 1
    return Layers(parent=max(numbered, key=lambda parent: numbered[parent]), chosen=()) if numbered else None


def prefix_of(stages: list[list[int]], chosen: Iterable[int]) -> int:
    """First layers of every stage to take so that fewest differ from `chosen`; of two equally good the larger."""
    wanted = set(chosen)
    most = max(map(len, stages), default=0)
    return min(range(most, -1, -1), key=lambda n: len(wanted ^ set(first_of(stages, n))))


def first_of(stages: list[list[int]], n: int) -> list[int]:
    return [number for stage in stages for number in stage[:n]]
