"""The block graph of a recorded step.

No forward runs again for the graph, and no model is loaded. The recording has names, kinds, calls, bytes and FLOPs, but
not the tensors that each operation reads. An arrow therefore goes from the block that returned a tensor, or else from
the last block that ran, to the tensor's next block. The recording does not show early stops of recomputes either, so a
rerun counts whole. `describe` (engine/model/describe.py) reads more, because it may run the model itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from explorer.engine.bench.timeline import operators_of
from explorer.engine.model.blocks import chain_of, has_running_statistics, module_fields, repeated_as
from explorer.engine.model.loaded import types_of
from explorer.engine.policy.apply import policy_of
from explorer.engine.watch.block_facts import BlockFacts
from explorer.engine.watch.tracker import FORWARD, Tracker
from explorer.plan.memory.reruns import reruns_outside
from explorer.plan.names import above, lineage
from explorer.record.graph import Block, Edge, ModelGraph, ModelRef, Trait
from explorer.record.measurement import MeasuredBlock

NOTE = "Arrows follow the tensors from call to call of a recorded step; additions and other joins are not drawn."


def recorded_graph(model: nn.Module, tracker: Tracker, costs: Sequence[MeasuredBlock], ref: ModelRef) -> ModelGraph:
    """The graph of `model` in the tracked step. Bytes and FLOPs are those of one forward of the step."""
    modules, n_bytes = dict(model.named_modules()), tracker.storages.n_bytes
    n_forwards = max(1, costs[0].n_forward)
    facts, traits = _facts(modules, tracker), _traits(modules, tracker)
    repeats = repeated_as(modules, facts)
    for fqn in reruns_outside(costs, policy_of(model).blocks):
        traits[fqn].add("checkpoints_itself")
    returned: dict[int, set[int]] = defaultdict(set)
    for block, outputs in zip(tracker.calls.block, tracker.calls.outputs):
        returned[block].update(outputs)
    blocks = tuple(
        Block(
            **module_fields(cost.fqn, modules[cost.fqn]),
            n_calls=-(-cost.n_forward // n_forwards),
            output_bytes=sum(n_bytes[storage] for storage in returned[block]) // n_forwards,
            saved_bytes=cost.saved_after_forward_bytes,
            forward_flops=cost.forward_flops // n_forwards,
            rerun_flops=cost.forward_flops // n_forwards,
            traits=tuple(sorted(traits[cost.fqn])),
            repeat_of=repeats.get(cost.fqn),
        )
        for block, cost in enumerate(costs)
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


def _facts(modules: Mapping[str, nn.Module], tracker: Tracker) -> dict[str, BlockFacts]:
    """Calls and operator signature of each block, for the chain and the search for repeated blocks."""
    operators: dict[int, list[int]] = defaultdict(list)
    for name, block, phase, *_ in operators_of(tracker).tolist():
        if phase == FORWARD:
            operators[block].append(name)
    calls = tracker.calls.block
    first_call = {block: number for number, block in zip(reversed(range(len(calls))), reversed(calls))}
    facts: dict[str, BlockFacts] = {}
    for block, (fqn, module) in reversed(list(enumerate(modules.items()))):
        children = (f"{fqn}.{name}".lstrip(".") for name, _ in module.named_children())
        # A module with several names is listed under its first name.
        below = [facts[child].signature for child in children if child in modules]
        signature = hash((tuple(operators[block]), *below))
        facts[fqn] = BlockFacts(
            n_calls=tracker.n_forward[block], first_call=first_call.get(block, 0), signature=signature
        )
    return facts


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
    # The tag of fused attention ignores the dropout.
    dice = {number for number in tracker.draws if "scaled_dot_product" not in tracker.op_names[number]}
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
