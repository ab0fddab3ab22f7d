"""Policies and runs without a prediction, and runs that contradict one: the reason for each, in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NoReturn

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.names import innermost, is_within, listed, overlaps, some, written_results
from explorer.plan.predict.changes import units_around
from explorer.plan.sizes import mib
from explorer.record.allocations import PhaseSpan
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


def not_predicted(policy: Policy, graph: ModelGraph | None, run: Measurement | None = None) -> str:
    """Why the peak of `policy` is not predicted from `run`; empty where it is."""
    if outside := not_covered(policy, run) or run_again_by_the_model(policy, graph):
        return outside
    written = dict.fromkeys(op for unit in policy.units for op in written_results(unit, graph))
    if written:
        return (
            f"No peak is predicted: torch refuses to keep what {some(tuple(written))} returns, because it is written "
            "in place. Keep operators whose results nothing writes into."
        )
    blocks = {} if graph is None else graph.by_fqn
    handed = tuple(fqn for fqn in policy.blocks if fqn in blocks and "keeps_cache" in blocks[fqn].traits)
    if handed:
        return (
            f"No peak is predicted: {some(handed)} are handed a cache, which the recompute fills a second time. "
            "Switch the cache off in training (use_cache=False)."
        )
    return ""


def run_again_by_the_model(policy: Policy, graph: ModelGraph | None) -> str:
    """A sentence on the units of `policy` inside, at or around blocks that the model checkpoints itself; or empty.

    The recorded step then shows part of what such a unit saves and runs again: not even its FLOPs are known.
    """
    blocks = graph.checkpointed_by_itself if graph else ()
    units = {fqn for fqn in policy.blocks if overlaps(fqn, *blocks)}
    if not units:
        return ""
    return (
        f"Nothing is predicted: the recompute of {some(sorted(units))} meets blocks that the model recomputes by "
        "itself. Switch the model's own checkpointing off, or press Run."
    )


def refuse_not_played(policy: Policy) -> None:
    """Raises BadInput for a policy with parts that no play of a rank shows."""
    if any(unit.action == "offload" for unit in policy.units):
        raise BadInput("A step of ranks without data does not show offload.", hint="Leave --ranks or offload out.")


def refuse_lost_gradients(fqn: str) -> NoReturn:
    """Raises BadInput for a unit without a gradient: a saving that costs the training is no prediction."""
    raise BadInput(
        f"Nothing is predicted: the reentrant checkpoint of {some((fqn,))} gets no input that requires a gradient, so "
        "nothing inside it would train.",
        hint="Set use_reentrant to False, or keep this block.",
    )


def not_covered(policy: Policy, run: Measurement | None = None) -> str:
    """A sentence on the parts of `policy` that a forecast from `run` does not cover; empty if it covers all of them."""
    nested = {unit for pair in units_around(policy).items() if pair[1] for unit in (pair[0], *pair[1])}
    offloaded = {unit for unit in policy.units if unit.action == "offload"}
    parts = ["offload inside or around another unit"] if offloaded & nested else []
    if policy.use_reentrant and policy.units:
        # Its inner backward holds gradients until the unit ends, which no timeline of a kept step shows: without them
        # forecasts were up to 11 % low. A step without data plays them.
        parts.append("reentrant checkpointing")
    if any(unit.action == "save_ops" for unit in nested):
        parts.append("kept operators inside or around another unit")
    if _overlap(policy):
        parts.append("units that share blocks and do not lie in each other")
    if parts:
        return f"The forecast does not cover {listed(parts)}: press Run."
    if offloaded and run is not None and (run.allocations is None or not run.allocations.saves.entry):
        return f"Offload is predicted from what autograd saves with everything kept, and {_no_saves(run)}."
    return ""


def _no_saves(run: Measurement) -> str:
    """Why `run` does not say what autograd saves."""
    if run.spec.policy.units:
        return "this step recomputes blocks: measure one that keeps everything"
    if run.origin == "recorded":
        auto_policy = "explorer.auto_policy(..., offload=True)"
        return f"a step of your own loop shows it to {auto_policy} alone, if one backward reads it"
    return "this step has none of it, two backwards read it, or an older version recorded it: press Run"


def _overlap(policy: Policy) -> bool:
    """Whether two units share a block and neither is a smaller part of the other: no run accepts them."""
    if len(set(policy.blocks)) == len(policy.blocks):
        return False
    naming: dict[str, list[set[str]]] = {}
    for unit in sorted(policy.units, key=lambda unit: len(unit.blocks)):
        for fqn in unit.blocks:
            naming.setdefault(fqn, []).append(set(unit.blocks))
    return any(not inner < outer for units in naming.values() for inner, outer in pairwise(units))


def approximate(policy: Policy, graph: ModelGraph | None, run: Measurement | None = None) -> str:
    """A sentence on blocks whose rerun holds memory that no forecast from `run` includes; empty if there are none."""
    twice = tuple(fqn for fqn in _passed_twice(run) if is_within(fqn, *policy.blocks))
    if twice:
        return (
            f"The predicted peak is approximate: the step runs backward more than once through {some(twice)}, and no "
            "forecast says which of them recomputes. A run measures it."
        )
    blocks = () if graph is None else graph.blocks
    holding = innermost(
        block.fqn for block in blocks if "keeps_graph" in block.traits and is_within(block.fqn, *policy.blocks)
    )
    if not holding:
        return ""
    return (
        f"The predicted peak is approximate: forward leaves a tensor with its autograd graph on {some(holding)}. "
        "The recompute may hold more memory until the next forward, which no forecast includes. A run measures it."
    )


def _passed_twice(run: Measurement | None) -> tuple[str, ...]:
    """Blocks through which several backwards of one forward pass: a kept graph, a penalty on gradients."""
    if run is None or run.allocations is None:
        return ()
    backwards: list[list[PhaseSpan]] = [[]]
    """Of each forward. The optimizer may step inside a backward, which is then one all the same."""
    before = ""
    for span in run.phases:
        if span.phase == "forward":
            backwards.append([])
        elif span.phase == "backward" and before == "backward":
            backwards[-1][-1] = replace(backwards[-1][-1], end_tick=span.end_tick)
        elif span.phase == "backward":
            backwards[-1].append(span)
        if span.phase in ("forward", "backward", "between"):
            before = span.phase
    log, twice = run.allocations, set[int]()
    for several in (spans for spans in backwards if len(spans) > 1):
        times = Counter[int]()
        for span in several:
            times.update({block for block, born in zip(log.block, log.born) if span.first_tick <= born < span.end_tick})
        twice |= {block for block, n in times.items() if n > 1}
    return tuple(filter(None, (log.blocks[block] for block in sorted(twice))))


def no_baseline(run: Measurement) -> str:
    """Why the step with everything kept is not predicted from `run`; empty where it is."""
    policy = run.spec.policy
    if not run.complete:
        return "Nothing is predicted from a run that was cut short. Measure one that fits."
    if run.ran_compiled:
        return "Nothing is predicted from a compiled step, whose blocks are not seen. Set TORCH_COMPILE_DISABLE=1."
    if not policy.units:
        return ""
    if run.allocations is None or not len(run.allocations.calls.block):
        return "Nothing is predicted from a run with recompute whose timeline has no calls of blocks."
    if policy.use_reentrant:
        return "Nothing is predicted from a run with use_reentrant, which hides what forward saves. Measure another."
    other = tuple(unit.blocks[0] for unit in policy.units if unit.action != "recompute")
    if other:
        return (
            f"Nothing is predicted from a run in which {some(other)} keep chosen operators or offload: the run does "
            "not show all that forward would keep. Measure one that recomputes them."
        )
    return ""


NOTABLE = 0.01
"""Share of the measured peak; below it a forecast and a run agree."""
_RECURRENT = ("LSTM", "GRU", "RNN")


def contradiction(
    predicted_bytes: int | None, run: Measurement, graph: ModelGraph, baseline: Measurement | None = None
) -> str:
    """Empty where they agree, or where one of them says nothing."""
    measured_bytes = run.step_peak_bytes
    if predicted_bytes is None or not measured_bytes:
        return ""
    off = predicted_bytes / measured_bytes - 1
    if abs(off) <= NOTABLE:
        return ""
    reason = next(_reasons(run, graph, baseline), "no known limit of the forecast explains it")
    return (
        f"The forecast of {mib(predicted_bytes)} is {abs(off):.1%} {'above' if off > 0 else 'below'} the "
        f"{mib(measured_bytes)} that the run held: {reason}."
    )


def _reasons(run: Measurement, graph: ModelGraph, baseline: Measurement | None) -> Iterator[str]:
    policy = run.spec.policy
    again = [block for block in graph.blocks if is_within(block.fqn, *policy.blocks)]
    caches = [block.fqn for block in again if "keeps_cache" in block.traits]
    if caches:
        yield f"{listed(caches)} is handed a cache, which its recompute fills a second time"
    graphs = innermost(block.fqn for block in again if "keeps_graph" in block.traits)
    if graphs:
        yield f"forward leaves a tensor with its graph on {listed(graphs)}, and so all that the recompute saved for it"
    recurrent = [block.fqn for block in again if block.kind in _RECURRENT]
    if recurrent:
        yield f"{listed(recurrent)} is recurrent, and its kernel keeps memory that no timeline shows"
    if baseline is not None:
        n_before, n_now = _births(baseline), _births(run)
        if n_before != n_now:
            yield (
                f"the two forwards did not make the same tensors ({n_before:,} and {n_now:,}), "
                "as where shapes depend on the data or on random numbers"
            )
    often = [block.fqn for block in again if block.n_calls > 1 and block.fqn in policy.blocks]
    if often:
        yield f"{listed(often)} is called more than once, and whose backward begins when is not known"


def _births(run: Measurement) -> int:
    """Tensors that operators of forward made; what a checkpoint keeps for itself no operator made."""
    log = run.allocations
    if log is None:
        return 0
    spans = [range(span.first_tick, span.end_tick) for span in run.phases if span.phase == "forward"]
    ticks = set(chain(*spans))
    return sum(bool(log.ops[op]) and born in ticks for born, op in zip(log.born, log.op))
