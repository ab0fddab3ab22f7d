"""Which derivative survives which kind of checkpointing: every cell is a run, none is written down."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record
from explorer.record.run import RunSpec

DerivativeKind = Literal[
    "backward",
    "autograd.grad",
    "backward twice",
    "create_graph",
    "Hessian-vector product",
    "gradient penalty",
    "eval mode",
]
Variant = Literal["keep", "recompute", "reentrant", "selective"]
CellOutcome = Literal["bitwise equal", "rounding", "different", "raises", "crashes", "not run"]


class DerivativeCell(Record):
    """One way to differentiate the model under one way to checkpoint it, held against keep."""

    derivative: DerivativeKind
    variant: Variant
    outcome: CellOutcome
    sentence: str
    """What a person reads: by how much it differs, or the exception's own words."""
    n_tensors: int = 0
    n_equal: int = 0
    """Bitwise equal, of `n_tensors`."""
    relative_norm: float | None = None
    """|variant - keep| / |keep| over all tensors, L2; an absent tensor counts as zero."""
    worst: str = ""
    """The tensor furthest off, or the first one that is missing."""


class DerivativeMatrix(Record):
    """Rows: derivatives. Columns: keep, and the same blocks recomputed in three ways."""

    spec: RunSpec
    blocks: tuple[str, ...]
    """The units that the three variants recompute."""
    cells: tuple[DerivativeCell, ...]

    def cell(self, derivative: DerivativeKind, variant: Variant) -> DerivativeCell:
        """Raises KeyError where that cell was left out."""
        for cell in self.cells:
            if (cell.derivative, cell.variant) == (derivative, variant):
                return cell
        raise KeyError((derivative, variant))
