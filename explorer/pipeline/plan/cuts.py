"""The cuts of a model into stages: the split whose heaviest stage is lightest.

Between two legal cuts lies an atom, blocks that must stay together. Min-max dynamic programming over atoms, O(stages x
atoms^2): `D[k, j] = min over i of max(D[k - 1, i], weight of atoms i..j as stage k)`, exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Literal

from msgspec.structs import replace

from explorer.errors import InvalidPlan, nearest
from explorer.pipeline.plan.actions import Rows
from explorer.pipeline.record.step import PipelineProfile
from explorer.plan.names import above, listed
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan

CutRule = Literal["by-parameters", "by-time", "by-memory"]
Stages = tuple[tuple[str, ...], ...]
N_REASONS = 3
"""Said of a model with too few places to cut."""


def atoms(graph: ModelGraph) -> Stages:
    """Blocks of the chain between legal cuts, in execution order."""
    refused = {(cut.after, cut.before) for cut in graph.cuts if cut.refusal is not None}
    groups: list[list[str]] = []
    for index, fqn in enumerate(graph.chain):
        if index == 0 or (graph.chain[index - 1], fqn) not in refused:
            groups.append([])
        groups[-1].append(fqn)
    return tuple(tuple(group) for group in groups)


def balance(n_atoms: int, n_stages: int, weight: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Start of every stage, such that the largest `weight(stage, first, end)` is smallest. Raises InvalidPlan.

    `weight` is that of atoms first..end-1 as stage number `stage`, and grows with every atom; equal splits go to the
    earliest cut.
    """
    if not 1 <= n_stages <= n_atoms:
        raise InvalidPlan(
            f"{n_stages} stages are asked; the model has {n_atoms} places for them.",
            hint=f"Use 1 to {n_atoms} stages." if n_atoms else "The model has no chain that could be cut.",
        )
    best = [weight(0, 0, end) for end in range(n_atoms + 1)]
    choices = []
    for stage in range(1, n_stages):
        row, choice = [float("inf")] * (n_atoms + 1), [0] * (n_atoms + 1)
        for end in range(stage + 1, n_atoms + 1):
            for first in range(end - 1, stage - 1, -1):
                weight_here = weight(stage, first, end)
                if weight_here > row[end] or weight_here == float("inf"):
                    break
                if max(best[first], weight_here) <= row[end]:
                    row[end], choice[end] = max(best[first], weight_here), first
        best = row
        choices.append(choice)
    starts, end = [], n_atoms
    for choice in reversed(choices):
        end = choice[end]
        starts.append(end)
    return (0, *reversed(starts))


def stages_by(
    rule: CutRule,
    graph: ModelGraph,
    n_stages: int,
    *,
    profile: PipelineProfile | None = None,
    pressure: tuple[Policy, Rows] | None = None,
) -> Stages:
    """Stages of equal parameters, time or memory.

    by-time takes the profile's milliseconds, and without a profile the counted FLOPs of forward. by-memory weighs
    what a stage holds at the schedule's in-flight microbatches: parameters, their gradients and saved bytes under the
    policy; `pressure` is policy and rows (without: one whole batch in flight, all kept). Raises InvalidPlan.
    """
    groups = atoms(graph)
    if n_stages > len(groups):
        raise _too_many(graph, n_stages, len(groups))
    if rule == "by-memory":
        starts = balance(len(groups), n_stages, _memory_weight(groups, graph, profile, pressure))
    else:
        sums = [0.0, *accumulate(_weight(rule, group, graph, profile) for group in groups)]
        starts = balance(len(groups), n_stages, lambda stage, first, end: sums[end] - sums[first])
    ends = (*starts[1:], len(groups))
    return tuple(tuple(fqn for group in groups[a:b] for fqn in group) for a, b in zip(starts, ends, strict=True))


def _too_many(graph: ModelGraph, n_stages: int, most: int) -> InvalidPlan:
    """The error for too many stages, with the reasons against further cuts that the graph knows."""
    why = list(dict.fromkeys(f"{cut.refusal} (behind {cut.after})" for cut in graph.cuts if cut.refusal is not None))
    because = f": {'; '.join(why[:N_REASONS])}" if why else ""
    return InvalidPlan(
        f"{n_stages} stages are asked, and {graph.model.target} can be cut into {most} at most{because}.",
        hint=f"Use {'1 stage' if most == 1 else f'1 to {most} stages'}.",
    )


def usual_rule(profile: PipelineProfile | None) -> CutRule:
    """The default rule: equal time if a profile has times, else equal parameters."""
    return "by-parameters" if profile is None else "by-time"


def n_in_flight(rows: Rows) -> tuple[int, ...]:
    """Most microbatches that wait for their backward, by stage; independent of what actions cost."""
    n_stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    most = [0] * n_stages
    for row in rows:
        now = [0] * n_stages
        for action in row:
            now[action.stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


def split_at_borders(policy: Policy, stages: Stages) -> Policy:
    """`policy` as stages can run it. A segment is split at stage borders, because a stage keeps its input anyway. A
    unit around blocks of the chain is left out."""
    stage_of = {fqn: stage for stage, blocks in enumerate(stages) for fqn in blocks}
    around = set(above(*stage_of))
    units = tuple(
        replace(unit, blocks=tuple(part))
        for unit in policy.units
        if around.isdisjoint(unit.blocks)
        for _, part in groupby(unit.blocks, key=stage_of.get)
    )
    return replace(policy, units=units)


def special_units(policy: Policy, plan: PipelinePlan) -> tuple[Unit, ...]:
    """Blocks of the stages that save operators or offload: their bytes are measured, because no rule predicts them."""
    whole = {fqn for blocks in plan.stages for fqn in blocks}
    special = (unit for unit in policy.units if unit.action != "recompute" and len(unit.blocks) == 1)
    return tuple(unit for unit in special if unit.blocks[0] in whole)


def left_out(plan: PipelinePlan, policy: Policy) -> str:
    """A sentence on the parts of the policy that a prediction leaves out; empty if there are none."""
    whole = {fqn for blocks in plan.stages for fqn in blocks}
    inside = [fqn for fqn in policy.blocks if fqn not in whole]
    segments = [unit for unit in policy.units if unit.action != "recompute" and whole.issuperset(unit.blocks)]
    wide = ["+".join(unit.blocks) for unit in segments if len(unit.blocks) > 1]
    sentences = []
    if inside:
        sentences.append(
            f"The prediction prices whole blocks: it leaves out what is recomputed inside one ({listed(inside)})."
        )
    if wide:
        sentences.append(f"It takes segments that save operators or offload as recomputed whole ({listed(wide)}).")
    offloaded = [unit.blocks[0] for unit in special_units(policy, plan) if unit.action == "offload"]
    if offloaded:
        sentences.append(
            f"It prices offloaded blocks one by one ({listed(offloaded)}), and was 0 to 7 % above measured peaks."
        )
    return " ".join(sentences)


def check_stages(graph: ModelGraph, stages: Stages) -> None:
    """Every block of the chain in exactly one stage, in order, legally cut. Raises InvalidPlan with all faults."""
    named = [fqn for stage in stages for fqn in stage]
    faults = [f"stage {j} is empty" for j, stage in enumerate(stages) if not stage]
    unknown = [fqn for fqn in named if fqn not in graph.chain]
    faults += [f"{fqn!r} is not on the model's chain. {nearest(fqn, graph.chain)}" for fqn in unknown]
    faults += [f"{fqn!r} is in no stage" for fqn in graph.chain if fqn not in named]
    faults += [f"{fqn!r} is in two stages" for fqn in dict.fromkeys(named) if named.count(fqn) > 1]
    if not faults and tuple(named) != graph.chain:
        faults.append(f"stages run in the order {', '.join(named)}; the model runs {', '.join(graph.chain)}")
    why = {cut.after: cut.refusal for cut in graph.cuts if cut.refusal is not None}
    faults += [f"no cut after {stage[-1]!r}: {why[stage[-1]]}" for stage in stages[:-1] if stage and stage[-1] in why]
    if faults:
        raise InvalidPlan(
            f"These stages do not fit {graph.model.target}: {'; '.join(faults)}.",
            hint="Every block of the chain belongs to exactly one stage, in execution order.",
        )


def _weight(rule: CutRule, group: Sequence[str], graph: ModelGraph, profile: PipelineProfile | None) -> float:
    if rule == "by-time" and profile:
        costs = (cost.kept for cost in profile.blocks if set(cost.blocks) <= set(group))
        return sum(cost.forward_ms + cost.backward_ms for cost in costs)
    blocks = [graph.by_fqn[fqn] for fqn in group]
    return float(sum(block.forward_flops if rule == "by-time" else block.parameter_bytes for block in blocks))


def _memory_weight(
    groups: Stages, graph: ModelGraph, profile: PipelineProfile | None, pressure: tuple[Policy, Rows] | None
) -> Callable[[int, int, int], float]:
    recomputed = set(pressure[0].blocks) if pressure else set()
    flying = n_in_flight(pressure[1]) if pressure else ()
    n_microbatches = 1 + max((a.microbatch for row in pressure[1] for a in row), default=0) if pressure else 1
    fixed, saved = [0.0], [0.0]
    for group in groups:
        blocks = [graph.by_fqn[fqn] for fqn in group]
        per_batch = sum(block.output_bytes if block.fqn in recomputed else block.saved_bytes for block in blocks)
        static = 2 * sum(block.parameter_bytes for block in blocks)
        if profile and (cost := next((cost for cost in profile.blocks if cost.blocks == group), None)):
            scale = profile.batch_rows / profile.n_rows
            per_batch = round(scale * (cost.recomputed if recomputed & set(group) else cost.kept).saved_bytes)
            static = cost.parameter_bytes + cost.gradient_bytes
        fixed.append(fixed[-1] + static)
        saved.append(saved[-1] + per_batch / n_microbatches)

    def weight(stage: int, first: int, end: int) -> float:
        waiting = flying[stage] if stage < len(flying) else 1
        return fixed[end] - fixed[first] + waiting * (saved[end] - saved[first])

    return weight
