"""One run, or two, beside what was alive at their peaks: what the reasons are read from, and how they name it."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.plan.names import is_within
from explorer.record.allocations import Ledger, Role
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCase:
    """Both runs, their peaks, and the model. Of one run alone: that run twice."""

    baseline: Measurement
    candidate: Measurement
    old: Ledger
    new: Ledger
    graph: ModelGraph | None

    @property
    def change(self) -> float:
        return self.new.total_bytes / max(self.old.total_bytes, 1) - 1

    @property
    def named(self) -> tuple[str, ...]:
        return self.candidate.spec.policy.blocks

    def saved(self, fqn: str, run: Measurement | None = None) -> int:
        cost = (run or self.baseline).by_fqn.get(fqn)
        return cost.saved_after_forward_bytes if cost else 0


def largest_roles(at: Ledger) -> list[tuple[Role, int]]:
    """What is there, by role, the most first."""
    return sorted(((role, size) for role, size in at.by_role.items() if size), key=lambda item: -item[1])


def toggled(case: PeakCase, fqn: str) -> str:
    """The block a person would toggle to reach `fqn`: a repeated block, else its first entry of a container."""
    known = case.graph.repeats if case.graph else ()
    parts = fqn.split(".")
    entry = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return next((block for block in known if is_within(fqn, block)), ".".join(parts[: entry + 1]))


def unit_name(fqns: tuple[str, ...]) -> str:
    """`layers.2`, or of a segment `layers.2 to layers.5`."""
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} to {fqns[-1]}"


def signed(change: float) -> str:
    """`+12 %`"""
    return f"{'+' if change > 0 else chr(0x2212)}{abs(change):.0%}".replace("%", " %")
