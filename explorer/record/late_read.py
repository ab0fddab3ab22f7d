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
