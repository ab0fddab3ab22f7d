"""Blocks of one stage that the policy recomputes together, as one checkpoint.

`apply_policy` puts a segment onto the Sequential that holds its blocks, but a stage calls the blocks and never the
Sequential. So the stage gets a small separate Sequential, at the same path, with the policy on it. Blocks that the
model's code calls one after the other need no Sequential, because the stage calls the blocks in the same way.

    model.layers (Sequential)   0  1 [2  3] 4  5        stage 1: 2 ─▶ 3 becomes one call of layers(2, 3), checkpointed
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from torch import Tensor, nn

from explorer.engine.pipeline.cut.tape import Step, Value
from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import runs_its_children
from explorer.engine.state.rng import generators_of
from explorer.errors import InvalidPlan
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan


@dataclass(frozen=True)
class Segment:
    """`n_steps` steps from `place` on, run by one call."""

    place: int
    n_steps: int
    run: nn.Sequential
    reads: int
    """Number of the value that goes in."""
    writes: int


def divided(model: nn.Module, policy: Policy, plan: PipelinePlan) -> tuple[Policy, tuple[Unit, ...]]:
    """The policy for `apply_policy` on the whole model, and the segments for the stages.

    Raises InvalidPlan for a segment with a cut inside, and for a unit that contains whole blocks of stages.
    """
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    wide = tuple(unit for unit in policy.units if len(unit.blocks) > 1 and set(unit.blocks) & set(stage_of))
    faults = []
    for unit in wide:
        homes = {stage_of.get(fqn) for fqn in unit.blocks}
        if len(homes) > 1:
            faults.append(f"{'+'.join(unit.blocks)} is cut")
    for unit in policy.units:
        inside = [fqn for fqn in stage_of if any(_holds(top, fqn) for top in unit.blocks)]
        if inside:
            faults.append(f"{'+'.join(unit.blocks) or 'the model'} holds {len(inside)} blocks of the stages")
    if faults:
        raise InvalidPlan(
            f"The policy and the stages do not fit together: {'; '.join(faults)}.",
            hint="Cut between recomputed segments, or recompute each block on its own.",
        )
    own = tuple(unit for unit in wide if runs_its_children(model.get_submodule(unit.blocks[0].rpartition(".")[0])))
    rest = tuple(unit for unit in policy.units if unit not in own)
    return msgspec.structs.replace(policy, units=rest), own


def segment_of(model: nn.Module, unit: Unit, policy: Policy, steps: tuple[Step, ...]) -> Segment:
    """`unit` as a segment of `steps`. Raises InvalidPlan if its blocks do not directly follow each other."""
    places = [k for k, step in enumerate(steps) if step.target in unit.blocks]
    members = [steps[k] for k in places]
    chained = [step.target for step in members] == list(unit.blocks) and places == list(
        range(places[0], places[-1] + 1)
    )
    if not chained or not all(_follows(before, after) for before, after in zip(members, members[1:])):
        raise InvalidPlan(
            f"{'+'.join(unit.blocks)} cannot run as one segment: something happens between its blocks.",
            hint="Recompute each block on its own.",
        )
    root = nn.Module()
    *path, _ = unit.blocks[0].split(".")
    run = nn.Sequential(OrderedDict((fqn.rpartition(".")[2], model.get_submodule(fqn)) for fqn in unit.blocks))
    run.train(model.get_submodule(".".join(path)).training)
    holder: nn.Module = run
    for name in reversed(path):
        outer = nn.Module()
        outer.add_module(name, holder)
        holder = outer
    root = holder
    named = generators_of(model)
    kept = [named[path] for path in policy.restore_rng if path in named]
    own = tuple(name for name in policy.restore_rng if name not in named)
    apply_policy(root, msgspec.structs.replace(policy, units=(unit,), restore_rng=own), generators=kept)
    (reads,), (writes,) = members[0].reads, members[-1].writes
    return Segment(places[0], len(places), run, reads, writes)


def _holds(top: str, fqn: str) -> bool:
    return fqn.startswith(f"{top}.") if top else True


def _follows(before: Step, after: Step) -> bool:
    """Whether `after` takes the result of `before`, and nothing else."""
    return isinstance(before.output, Value) and after.args == (before.output,) and not after.kwargs


def run_segment(segment: Segment, values: dict[int, Tensor]) -> None:
    """Runs one checkpointed call. The input value is released, as between blocks."""
    value = values.pop(segment.reads)
    values[segment.writes] = segment.run(value)
