"""Why memory was refused, and what would have fitted: the sentences that a run cut short leaves behind."""

from __future__ import annotations

from explorer.errors import BadInput
from explorer.plan.memory.ledger import holders, ledger
from explorer.plan.names import is_within, listed
from explorer.plan.planners.budget import Planner
from explorer.plan.sizes import mib
from explorer.record.allocations import Ledger
from explorer.record.measurement import Measurement


def refusal(run: Measurement, whole: Measurement | None = None) -> tuple[str, ...]:
    """Sentences on the bytes held when `run` was refused, and a policy that fits; `whole` is an earlier full step."""
    if run.failure is None or run.allocations is None or not run.allocations.n_bytes:
        return ()
    return (_held(run), _fits(run, whole) if whole is not None else _could_go(run))


def _then(run: Measurement) -> Ledger:
    """The ledger right after the last granted allocation. An earlier moment may have held more."""
    assert run.allocations is not None
    return ledger(run, max(run.allocations.born))


def _held(run: Measurement) -> str:
    at = _then(run)
    return f"Held then: {mib(at.total_bytes)}, of it {holders(at)}."


def _fits(run: Measurement, whole: Measurement) -> str:
    """A sentence on the cheapest policy that keeps the earlier step within the memory that was available."""
    assert run.failure is not None and run.allocations is not None
    # Both figures are from when the error arrived: the refused operator had freed its memory by then.
    there = run.allocations.held_bytes[-1] + (run.failure.free_bytes or 0)
    before = f"an earlier step held {mib(whole.step_peak_bytes or 0)}"
    if whole.graph is None:
        return f"There was room for {mib(there)}; {before}."
    try:
        plan = Planner(whole, whole.graph, seconds=1.0).within(there)
    except BadInput as error:
        return f"There was room for {mib(there)}; {before}. {error.sentence}"
    n_units = len(plan.policy.units)
    if not n_units:
        return f"There was room for {mib(there)}; {before}, which fits: this step is larger."
    return (
        f"There was room for {mib(there)}; {before}. With {listed(plan.policy.blocks)} recomputed it would have peaked "
        f"at {mib(plan.step_peak_bytes)} (predicted)."
    )


def _could_go(run: Measurement) -> str:
    """A sentence on the held bytes that recomputing could have freed, without a complete step."""
    repeats = run.graph.repeats if run.graph is not None else ()
    ran = [fqn for fqn in repeats if run.by_fqn.get(fqn) is not None and run.by_fqn[fqn].n_forward]
    cells = [cell for cell in _then(run).cells if cell.role == "saved activation"]
    freed = sum(cell.n_bytes for cell in cells if any(is_within(cell.block, fqn) for fqn in ran))
    if not freed:
        return "Record a step that fits (a smaller batch, or every block recomputed): a plan needs a whole one."
    return (
        f"Saved activations of {listed(tuple(ran))} hold {mib(freed)} of it: recomputing them frees most of that. "
        "A plan needs a step that fits: record one with a smaller batch, or with these blocks recomputed."
    )
