"""A run that contradicts its forecast: by how much, and what is the likely reason, in one sentence.

Reasons are looked for in what is known not to be foreseen (saved_by_call.py, forecast.py), the most telling first.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.plan.names import is_within, listed
from explorer.plan.sizes import mib
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement

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
    reason = next(_reasons(run, graph, baseline), "nothing that is known not to be foreseen explains it")
    return (
        f"The forecast of {mib(predicted_bytes)} is {abs(off):.1%} {'above' if off > 0 else 'below'} the "
        f"{mib(measured_bytes)} that the run held: {reason}."
    )


def _reasons(run: Measurement, graph: ModelGraph, baseline: Measurement | None) -> Iterator[str]:
    policy = run.spec.policy
    again = [block for block in graph.blocks if any(is_within(block.fqn, fqn) for fqn in policy.blocks)]
    caches = [block.fqn for block in again if "keeps_cache" in block.traits]
    if caches:
        yield f"{listed(caches)} is handed a cache, which its recompute fills once more"
    recurrent = [block.fqn for block in again if block.kind in _RECURRENT]
    if recurrent:
        yield f"{listed(recurrent)} is recurrent, and its kernel keeps memory of its own that no timeline shows"
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
    spans = [(span.first_tick, span.end_tick) for span in run.phases if span.phase == "forward"]
    return sum(
        bool(log.ops[op]) and any(first <= born < end for first, end in spans) for born, op in zip(log.born, log.op)
    )
