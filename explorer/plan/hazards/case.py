"""What every hazard rule looks at: a graph, a policy, perhaps a plan and a run, and the questions rules ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from explorer.record.graph import Block, ModelGraph, Trait
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec


@dataclass(frozen=True)
class Case:
    """One question to the rules. Nothing is run to answer it."""

    graph: ModelGraph
    policy: Policy
    plan: PipelinePlan | None = None
    spec: RunSpec | None = None

    @cached_property
    def rerun(self) -> tuple[Block, ...]:
        """Every block that runs again: those the policy recomputes and all below them, in module order."""
        tops = {fqn for unit in self.policy.units if unit.action != "offload" for fqn in unit.blocks}
        return tuple(block for block in self.graph.blocks if not tops.isdisjoint(lineage(block.fqn)))

    @cached_property
    def units(self) -> tuple[tuple[Unit, tuple[Block, ...]], ...]:
        """Each unit with the blocks it names, as far as the graph knows them."""
        known = self.graph.by_fqn
        return tuple((unit, tuple(known[fqn] for fqn in unit.blocks if fqn in known)) for unit in self.policy.units)

    def rerun_with(self, trait: Trait) -> tuple[str, ...]:
        """Innermost blocks with `trait` among those that run again: the ones a person can point at."""
        return innermost(block.fqn for block in self.rerun if trait in block.traits)

    @property
    def trains(self) -> bool:
        """Whether dropout draws and statistics move: not so in eval mode."""
        return self.spec is None or self.spec.mode == "train"

    @property
    def on_cuda(self) -> bool:
        return self.spec is not None and self.spec.device == "cuda"

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Stage of each block that a stage holds, everything below included."""
        if self.plan is None:
            return {}
        tops = {fqn: j for j, stage in enumerate(self.plan.stages) for fqn in stage}
        found = {}
        for block in self.graph.blocks:
            nearest = next((fqn for fqn in lineage(block.fqn) if fqn in tops), None)
            if nearest is not None:
                found[block.fqn] = tops[nearest]
        return found


def lineage(fqn: str) -> Iterator[str]:
    """`fqn` and everything above it, nearest first; the model itself, the empty name, comes last."""
    yield fqn
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def is_under(fqn: str, top: str) -> bool:
    """Whether `fqn` is `top` or lies below it; everything lies below the model itself, the empty name."""
    return fqn == top or not top or fqn.startswith(f"{top}.")


def innermost(fqns: Iterator[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Those without another of them below."""
    named = tuple(fqns)
    above = {fqn for one in named for fqn in islice(lineage(one), 1, None)}
    return tuple(fqn for fqn in named if fqn not in above)


def some(fqns: tuple[str, ...] | list[str]) -> str:
    """`a, b, c and 5 more`."""
    named = [fqn or "the model" for fqn in fqns]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
