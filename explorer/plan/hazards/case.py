"""What every hazard rule looks at: a graph, a policy, perhaps a plan and a run, and the questions rules ask of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from explorer.plan.names import innermost, lineage
from explorer.record.graph import Block, ModelGraph, Trait
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan, RunSpec


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

    def handed(self, trait: Trait) -> tuple[str, ...]:
        """Blocks with `trait` that their unit begins with. What a unit is handed from outside is kept for its rerun."""
        return tuple(block.fqn for _, named in self.units for block in named[:1] if trait in block.traits)

    def handing_on(self, trait: Trait) -> tuple[str, ...]:
        """Blocks with `trait` that their unit ends with."""
        return tuple(block.fqn for _, named in self.units for block in named[-1:] if trait in block.traits)

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
        stages = {}
        for block in self.graph.blocks:
            nearest = next((fqn for fqn in lineage(block.fqn) if fqn in tops), None)
            if nearest is not None:
                stages[block.fqn] = tops[nearest]
        return stages
