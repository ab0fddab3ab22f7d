"""Policies whose peak cannot be foretold from a measured baseline, and why, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from explorer.plan.forecast.nesting import enclosing
from explorer.plan.kept_results import written_results
from explorer.plan.names import some
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit

KNOWN = ("save_ops", "recompute")
"""Actions of a unit and of the one around it that are foreseen together."""


def unforeseen(policy: Policy, graph: ModelGraph | None, *, moves: bool = True) -> str:
    """Empty: nothing is known against a forecast. `moves`: what is offloaded leaves the device, which is no CPU."""
    if trains_nothing(policy, graph):
        idle = _with_trait([unit.blocks[0] for unit in policy.units], graph, "inputs_need_no_grad")
        return (
            f"Nothing is foretold: with use_reentrant {some(idle)} train nothing, because no tensor that they are "
            "given requires grad."
        )
    written = dict.fromkeys(op for unit in policy.units for op in written_results(unit, graph))
    if written:
        return (
            f"Nothing is foretold: torch refuses to keep what {some(tuple(written))} returns, because it is written in "
            "place; keep operators whose results nothing writes into."
        )
    other = _otherwise_nested(policy, moves=moves)
    if other:
        return (
            f"Not foretold: {some(tuple(unit.blocks[0] for unit in policy.units if unit in other))} keep chosen "
            "operators or offload, inside another unit or around one; a run measures it."
        )
    often = [] if graph is None else [
        fqn for fqn in policy.blocks if fqn in graph.by_fqn and graph.by_fqn[fqn].n_calls > 1
    ]  # fmt: skip
    if policy.use_reentrant and often:
        return (
            f"The peak is not foretold with use_reentrant: {some(tuple(often))} are called more than once, and each "
            "call's backward would add to the gradients at once that the baseline sums up at the end."
        )
    handed = _with_trait(policy.blocks, graph, "keeps_cache")
    if handed:
        return (
            f"The peak is not foretold: {some(handed)} are handed a cache, which the recompute fills once more "
            "(44 % more than a forecast was seen); switch the cache off in training (use_cache=False)."
        )
    return ""


def no_baseline(run: Measurement) -> str:
    """Why the step with everything kept cannot be told from `run`; empty: nothing is known against it."""
    policy = run.spec.policy
    if not run.complete:
        return "Nothing is foretold from a run that was cut short; measure one that fits."
    if not policy.units:
        return ""
    if run.allocations is None or not len(run.allocations.calls.block):
        return "Nothing is foretold from a run with recompute whose timeline does not know the calls of blocks."
    if policy.use_reentrant:
        return "Nothing is foretold from a run with use_reentrant, which hides what forward saves; measure another."
    other = tuple(unit.blocks[0] for unit in policy.units if unit.action != "recompute")
    if other:
        return (
            f"Nothing is foretold from a run in which {some(other)} keep chosen operators or offload: it does not show "
            "all that forward would keep; measure one that recomputes them."
        )
    return ""


def _otherwise_nested(policy: Policy, *, moves: bool) -> set[Unit]:
    """Units inside others or around them that do more, or less, than run again."""
    outer = enclosing(policy)
    running = tuple(unit for unit in policy.units if unit.action != "offload")
    stays = not moves and not policy.use_reentrant and len(running) < len(policy.units)
    if stays and not any(_is_parted(unit, outer) for unit in running):  # offload_inside.py knows
        outer = enclosing(msgspec.structs.replace(policy, units=running))
    if not policy.use_reentrant:  # nesting.py knows what a unit keeps of operators inside one that runs again
        outer = {unit: holder for unit, holder in outer.items() if (unit.action, holder.action) != KNOWN}
    return {one for pair in outer.items() for one in pair if one.action != "recompute"}


def _is_parted(unit: Unit, outer: Mapping[Unit, Unit]) -> bool:
    """Whether an offloaded unit lies between this one and another that runs again."""
    parted = False
    while unit in outer:
        unit = outer[unit]
        if parted and unit.action != "offload":
            return True
        parted = parted or unit.action == "offload"
    return False


def trains_nothing(policy: Policy, graph: ModelGraph | None) -> bool:
    """Whether a unit has no gradients at all under reentrant checkpointing: then nothing of the baseline is left."""
    firsts = [unit.blocks[0] for unit in policy.units if unit.action != "offload"]
    return policy.use_reentrant and bool(_with_trait(firsts, graph, "inputs_need_no_grad"))


def _with_trait(fqns: Sequence[str], graph: ModelGraph | None, trait: str) -> tuple[str, ...]:
    known = {} if graph is None else graph.by_fqn
    return tuple(fqn for fqn in fqns if fqn in known and trait in known[fqn].traits)
