"""Traps that reach out of their block: skip connections inside a tuple, and a rerun that ends the process."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.lab.kit.apart import Trial, rows_apart
from explorer.lab.kit.bench import (
    DISTANCE,
    Bench,
    Gradients,
    Setting,
    Shown,
    attempt,
    baseline_row,
    compared_row,
    gradients_of,
    mean_square,
    number,
)
from explorer.lab.kit.nets import BATCH, WIDTH
from explorer.lab.state import CHECK_OFF, flip_row
from explorer.record.lab import LabChart, LabRow, LabSeries

eager_checkpoint = inspect.unwrap(checkpoint)
"""torch's checkpoint without the decorator that imports the compiler: a second for each process, of no use here."""


def nested_skips(setting: Setting, bench: Bench) -> Shown:
    """Two checkpoints under one danger, each in a process of its own."""
    danger = setting["danger"]
    trials: list[Trial] = [(skip_row, (engine, danger)) for engine in ("non-reentrant", "reentrant")]
    if danger == "flip":
        trials = [(flip_row, (label, "batchnorm", "between")) for label in (CHECK_OFF, "reentrant")]
    rows = (baseline_row("keep"), *rows_apart(trials, bench))
    chart = LabChart(
        kind="bars",
        title="How wrong is the gradient? (no bar: no gradient came back)",
        x_title="checkpoint",
        y_title=DISTANCE,
        x=tuple(row.label for row in rows[1:]),
        series=(LabSeries(name=DISTANCE, y=tuple(number(row, DISTANCE) for row in rows[1:]), part="candidate"),),
    )
    n_died = sum(row.outcome == "crashed" for row in rows)
    fate = (
        f"{n_died} of {len(trials)} processes died; this one reports it and goes on."
        if n_died
        else "Each process came to its end; had one died, it would be reported here like any other result."
    )
    return Shown(rows, chart, (*map(_finding, rows[1:]), fate))


def _finding(row: LabRow) -> str:
    words = f"{row.outcome}: {row.note}" if row.note else f"gradients {row.outcome}"
    return f"{row.label.capitalize()}: {words}."


class TupleBlock(nn.Module):
    """Adds up its skips, which come inside a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: tuple[Tensor, ...]) -> Tensor:
        return torch.tanh(self.linear(x) + sum(skips))


class ArgumentBlock(TupleBlock):
    """Adds up its skips, which are arguments of their own."""

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, skips)


def skip_row(bench: Bench, engine: str, danger: str) -> LabRow:
    """The row of one checkpoint, computed in this very process."""
    expected, reference = (_gradients(bench, "keep", danger, dtype) for dtype in (torch.float32, torch.float64))
    found = attempt(partial(_gradients, bench, engine, danger, torch.float32))
    return compared_row(engine, expected, found, reference=reference)


def _gradients(bench: Bench, engine: str, danger: str, dtype: torch.dtype) -> Gradients:
    """Three blocks, each of which also gets the outputs of all before it."""
    torch.manual_seed(0)
    kind = TupleBlock if danger == "tuple" else ArgumentBlock
    blocks = nn.ModuleList(kind() for _ in range(3)).to(bench.device, dtype)
    x = bench.normal(BATCH, WIDTH).to(dtype).requires_grad_()
    skips: list[Tensor] = []
    for block in blocks:
        arguments = (tuple(skips),) if danger == "tuple" else tuple(skips)
        if engine == "keep":
            x = block(x, *arguments)
        else:
            x = eager_checkpoint(block, x, *arguments, use_reentrant=engine == "reentrant")
        skips.append(x)
    mean_square(x).backward()
    return gradients_of(blocks)
