"""Block graph of a step recorded in a user's loop. No forward runs again, no model is loaded.

The recording has names, kinds, calls, bytes and FLOPs, but not the tensors that each operation reads. An arrow
therefore goes from the block that returned a tensor, or else from the last block that ran, to the tensor's next block.
The recording does not show early stops of recomputes either, so a rerun counts whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from explorer.engine.bench.timeline import operators_of
from explorer.engine.model.blocks import chain_of, has_running_statistics, module_fields, repeated_as
from explorer.engine.model.loaded import types_of
from explorer.engine.policy.apply import policy_of
from explorer.engine.watch.block_facts import BlockFacts
from explorer.engine.watch.tracker import FORWARD, Tracker
from explorer.plan.names import above, lineage
from explorer.plan.why.caveats import reruns_outside
from explorer.record.graph import Block, Edge, ModelGraph, ModelRef, Trait
from explorer.record.measurement import MeasuredBlock

NOTE = "Arrows follow the tensors from call to call of a recorded step; additions and other joins are not drawn."


def recorded_graph(model: nn.Module, tracker: Tracker, costs: Sequence[MeasuredBlock], ref: ModelRef) -> ModelGraph:
    """The graph of `model` in the tracked step. Bytes and FLOPs are those of one forward of the step."""
    modules = dict(model.named_modules())
    cost_of = {cost.fqn: cost for cost in costs}
    n_forwards = max(1, cost_of[""].n_forward)
    calls = _calls_by_block(tracker)
    facts = _facts(modules, tracker, cost_of, calls)
    repeats = repeated_as(modules, facts)
    traits = _traits(modules, tracker)
    for fqn in reruns_outside(costs, policy_of(model).blocks):
        traits[fqn].add("checkpoints_itself")
    n_bytes = tracker.storages.n_bytes
    blocks = tuple(
        Block(
            **module_fields(fqn, module),
            n_calls=-(-cost_of[fqn].n_forward // n_forwards),
            output_bytes=sum(n_bytes[storage] for storage in _returned(tracker, calls[fqn])) // n_forwards,
            saved_bytes=cost_of[fqn].saved_after_forward_bytes,
            forward_flops=cost_of[fqn].forward_flops // n_forwards,
            rerun_flops=cost_of[fqn].forward_flops // n_forwards,
            traits=tuple(sorted(traits[fqn])),
            repeat_of=repeats.get(fqn),
        )
        for fqn, module in modules.items()
    )
    return ModelGraph(
        model=ref,
        blocks=blocks,
        edges=_edges(tracker, n_forwards),
        chain=chain_of(modules, facts),
        dtype=types_of(model).partition(",")[0] or "float32",
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        note=NOTE,
    )


def _calls_by_block(tracker: Tracker) -> dict[str, list[int]]:
    """Numbers in the call log of each block's forward calls."""
    by_block: dict[str, list[int]] = {fqn: [] for fqn in tracker.fqns}
    for number, block in enumerate(tracker.calls.block):
        by_block[tracker.fqns[block]].append(number)
    return by_block


def _returned(tracker: Tracker, calls: Sequence[int]) -> set[int]:
    return {storage for call in calls for storage in tracker.calls.outputs[call]}


def _facts(
    modules: Mapping[str, nn.Module],
    tracker: Tracker,
    costs: Mapping[str, MeasuredBlock],
    calls: Mapping[str, Sequence[int]],
) -> dict[str, BlockFacts]:
    """Calls and operator signature of each block, for the chain and the search for repeated blocks."""
    operators: dict[int, list[int]] = defaultdict(list)
    for name, block, phase, *_ in operators_of(tracker).tolist():
        if phase == FORWARD:
            operators[block].append(name)
    facts: dict[str, BlockFacts] = {}
    for block, fqn in reversed(list(enumerate(modules))):
        below = [facts[f"{fqn}.{name}".lstrip(".")] for name, _ in _unique_children(fqn, modules)]
        signature = hash((tuple(operators[block]), *(child.signature for child in below)))
        first = calls[fqn][0] if calls[fqn] else 0
        facts[fqn] = BlockFacts(n_calls=costs[fqn].n_forward, first_call=first, signature=signature)
    return facts


def _unique_children(fqn: str, modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Children listed in `modules` under this name. A module with several names is listed under its first name."""
    children = modules[fqn].named_children()
    return [(name, child) for name, child in children if f"{fqn}.{name}".lstrip(".") in modules]


def _edges(tracker: Tracker, n_forwards: int) -> tuple[Edge, ...]:
    """Arrows between calls of blocks without called blocks inside, in the first forward of the step."""
    log = tracker.calls
    holders = {holder for fqn, n in zip(tracker.fqns, tracker.n_forward) if n for holder in above(fqn)}
    made_by: dict[int, str] = {}
    edges: dict[tuple[str, str], Edge] = {}
    last = ""
    for number in range(len(log.block) // n_forwards):
        fqn = tracker.fqns[log.block[number]]
        if fqn in holders:
            continue
        for storage in log.inputs[number]:
            source = made_by.get(storage, last if storage >= tracker.storages.n_before_step else "")
            if source and source != fqn and (source, fqn) not in edges:
                edges[source, fqn] = Edge(
                    source=source, target=fqn, n_bytes=tracker.storages.n_bytes[storage], data=storage
                )
        made_by.update(dict.fromkeys(log.outputs[number], fqn))
        last = fqn
    return tuple(edges.values())


def _traits(modules: Mapping[str, nn.Module], tracker: Tracker) -> dict[str, set[Trait]]:
    """Traits from each module's kind and from operators that draw random numbers. Ancestors inherit both."""
    traits: dict[str, set[Trait]] = {fqn: set() for fqn in modules}
    dice = {number for number, name in enumerate(tracker.op_names) if name and _draws(name)}
    drawn = {tracker.fqns[block] for name, block, *_ in operators_of(tracker).tolist() if name in dice}
    for fqn, module in modules.items():
        inherited: set[Trait] = {"uses_rng"} if fqn in drawn else set()
        if has_running_statistics(module):
            inherited.add("running_statistics")
        for holder in lineage(fqn):
            if holder in traits:
                called = tracker.n_forward[tracker.scopes.index[holder]]
                traits[holder] |= inherited if called else inherited - {"uses_rng"}
    return traits


def _draws(name: str) -> bool:
    """Whether the operator `name` draws random numbers. Fused attention is excluded: its tag ignores the dropout."""
    namespace, packet, overload = (*name.split("."), "default")[:3]
    if "scaled_dot_product" in name or not hasattr(torch.ops, namespace):
        return False
    operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return operator is not None and torch.Tag.nondeterministic_seeded in operator.tags
