"""What is alive at one moment of a step, by role and by block. The cells add up to the bytes held, exactly."""

from __future__ import annotations

from functools import cached_property

from explorer.record.allocations import ROLES, Phase, Role
from explorer.record.base import Record


class LedgerCell(Record):
    """Allocations of one role in one block that are alive at the tick."""

    role: Role
    block: str
    n_bytes: int
    n_allocations: int
    largest_op: str
    """Operator that made the largest of them; the empty string: made before the step."""


class Ledger(Record):
    """Everything alive at `tick`, largest cell first."""

    tick: int
    phase: Phase | None
    """None: before the step, or the phases were not recorded."""
    phase_block: str
    """Block that runs again at the tick; the empty string outside recompute."""
    phase_share: float | None
    """How far the phase had come, 0 at its first tick and 1 at its last; backward counts the recomputes inside it."""
    at_block: str
    """Block whose allocation or free is the tick; the empty string: the model itself, or unknown."""
    is_peak: bool
    cells: tuple[LedgerCell, ...]

    @cached_property
    def total_bytes(self) -> int:
        return sum(cell.n_bytes for cell in self.cells)

    @cached_property
    def by_role(self) -> dict[Role, int]:
        """Bytes of each role, every role named, in stacking order."""
        totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
        for cell in self.cells:
            totals[cell.role] += cell.n_bytes
        return totals

    @cached_property
    def by_block(self) -> dict[str, int]:
        """Bytes of each block, largest first."""
        totals: dict[str, int] = {}
        for cell in self.cells:
            totals[cell.block] = totals.get(cell.block, 0) + cell.n_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))
