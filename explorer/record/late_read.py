"""What a recompute finds that is not what forward found. comparison.py holds differences of results, not of causes."""

from __future__ import annotations

from explorer.record.base import Record


class LateRead(Record):
    """A value that the code of a block reads at its entry, which is another one in the recompute than in forward."""

    block: str
    """First block of the unit that reads the value."""
    owner: str
    """The block that holds the value; empty for a value of a file, a class or the process."""
    name: str
    """Such as `config.step`, or a setting: `torch's default dtype`."""
    in_forward: str
    """Short form of the value."""
    in_recompute: str

    @property
    def sentence(self) -> str:
        return f"the recompute of {self.block} reads {self.name} {self.in_recompute}, forward read {self.in_forward}"


class Departure(Record):
    """The first operator of a block whose result in the recompute is not the result in forward."""

    block: str
    """The innermost block that runs the operator."""
    operator: str
    """As torch names it, such as `aten.mul.Tensor`."""
    in_forward: str
    """Short form of the result."""
    in_recompute: str
    line: str = ""
    """`net.py:14`: the line of the model's file that calls the operator; empty if no such line runs."""
    instead_of: str = ""
    """The operator that forward ran at this place, if it is another one."""

    @property
    def sentence(self) -> str:
        where = f"{self.line}, in {self.block or 'the model itself'}" if self.line else self.block or "the model itself"
        what = f"The recompute first departs from forward at {self.operator} ({where})"
        if self.instead_of:
            return f"{what}: forward ran {self.instead_of} there."
        return f"{what}: {self.in_forward} in forward, {self.in_recompute} in the recompute."
