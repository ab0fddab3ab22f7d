"""Where in a step a moment lies and who holds most there, in words."""

from __future__ import annotations

from explorer.plan.sizes import mib
from explorer.record.allocations import Ledger, Role

PLURAL: dict[Role, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "input": "inputs",
    "temporary": "temporaries",
    "saved activation": "saved activations",
    "recomputed": "recomputed activations",
    "gradient": "gradients",
    "unattributed": "bytes inside kernels",
}


def place(at: Ledger) -> str:
    """As a noun: `the end of forward in head`, `the recompute of layers.0`."""
    if at.phase is None or at.phase_share is None:
        return "the time before the step"
    if at.phase == "recompute":
        return f"the recompute of {at.phase_block}"
    if at.phase == "optimizer":
        return "the optimizer step"
    if at.phase == "between":
        return "the loop's own code between the phases"
    part = "start" if at.phase_share < 0.1 else "end" if at.phase_share > 0.9 else "middle"
    return f"the {part} of {at.phase}" + (f" in {at.at_block}" if at.at_block else "")


def in_place(at: Ledger) -> str:
    """With its preposition."""
    where = place(at)
    return f"at {where}" if where.startswith(("the start", "the end")) else f"in {where}"


def holders(at: Ledger, n_shown: int = 3) -> str:
    """The roles that hold most, and of each the block: `gradient 8.0 MiB (most in head), input 2.0 MiB`."""
    largest = sorted(at.by_role.items(), key=lambda item: -item[1])[:n_shown]
    parts = []
    for role, n_bytes in ((role, n_bytes) for role, n_bytes in largest if n_bytes):
        most = next((cell for cell in at.cells if cell.role == role), None)
        where = (
            f" ({'most ' if n_bytes > most.n_bytes else ''}in {most.block})" if most is not None and most.block else ""
        )
        parts.append(f"{role} {mib(n_bytes)}{where}")
    return ", ".join(parts)
