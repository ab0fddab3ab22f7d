"""Masks of forward and of the rerun, laid side by side."""

from __future__ import annotations

from torch import Tensor, nn

from explorer.lab.kit.nets import Dropped, blocks_of
from explorer.lab.kit.rows import measured
from explorer.record.lab import LabChart, LabRow, LabSeries, RowOutcome

N_BLOCKS = 4
MISMATCH = "mask elements that differ"


def agreement(a: Tensor, b: Tensor) -> float:
    """Share of elements that are equal."""
    return float((a == b).double().mean())


def mismatches(model: nn.Sequential) -> list[float]:
    """Share of each block's mask that its rerun drew differently."""
    pairs = [block.dropout.masks for block in blocks_of(model, Dropped)]
    return [float((masks[0] != masks[1]).double().mean()) for masks in pairs]


def mask_rows(shares: list[float]) -> list[LabRow]:
    """One row a block."""
    outcomes: list[RowOutcome] = ["bitwise equal" if share == 0 else "different" for share in shares]
    return [
        LabRow(label=f"mask of block{i}", outcome=outcomes[i], figures=(measured(MISMATCH, share, "share"),))
        for i, share in enumerate(shares)
    ]


def chance_of(p: float) -> float:
    """Share of elements in which two independent masks differ."""
    return 2 * p * (1 - p)


def mask_chart(shares: list[float], p: float) -> LabChart:
    """Each block's mismatch beside that of two masks which have nothing to do with each other."""
    return LabChart(
        kind="bars",
        title="How much of each mask did the rerun draw differently?",
        x_title="block",
        y_title=MISMATCH,
        unit="%",
        x=tuple(f"block{i}" for i in range(len(shares))),
        series=(
            LabSeries(name="rerun against forward", y=tuple(100 * share for share in shares), part="recompute"),
            LabSeries(
                name="two independent masks, 2p(1-p)", y=tuple(100 * chance_of(p) for _ in shares), part="baseline"
            ),
        ),
    )
