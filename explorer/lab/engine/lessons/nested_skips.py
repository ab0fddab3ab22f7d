"""Tensors inside tuples, and a process that may die.

The reentrant checkpoint cuts tensors off from the graph only where they are direct arguments. A skip connection
inside a tuple stays connected. The inner backward then wanders out of its block and uses up parts of the graph that the
outer backward still needs. Depending on the net that is an exception, a wrong gradient or a dead interpreter.

So each run of this experiment has a process of its own.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Setting,
    attempt,
    gradients_of,
    mean_square,
    row_of_process,
)
from explorer.lab.engine.kit.nets import BATCH, WIDTH
from explorer.lab.engine.kit.rows import baseline_row, compared_row, distance_bars, outcome_sentence
from explorer.lab.record import LabRow

THEME, PLACE = "Traps", 3
QUESTION = "What can a checkpoint do to the program around it?"
SWITCHES = {
    "danger": (
        "What does the block do?",
        {
            "tuple": "Takes skip connections inside a tuple",
            "arguments": "Takes the same skip connections as direct arguments",
        },
    ),
}
WORDS = ("reentrant", "non-reentrant", "gradient")

eager_checkpoint = inspect.unwrap(checkpoint)
"""torch's checkpoint without the decorator that imports the compiler: a second for each process, of no use here."""


def run(setting: Setting, bench: LabBench) -> Answer:
    """Two checkpoints under one danger, each in a process of its own."""
    danger = setting["danger"]
    rows = [baseline_row("keep")]
    rows += [row_of_process(skip_row, bench, engine, danger) for engine in ("non-reentrant", "reentrant")]
    chart = distance_bars(rows[1:], "How wrong is the gradient? (no bar: no gradient came back)")
    n_died = sum(row.outcome == "crashed" for row in rows)
    fate = (
        f"{n_died} of {len(rows) - 1} processes died; this one reports it and goes on."
        if n_died
        else "Each process came to its end; had one died, it would be reported here like any other result."
    )
    return Answer(tuple(rows), chart, (*map(outcome_sentence, rows[1:]), fate))


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


def skip_row(bench: LabBench, engine: str, danger: str) -> LabRow:
    """The row of one checkpoint, computed in this very process."""
    expected, reference = (_gradients(bench, "keep", danger, dtype) for dtype in (torch.float32, torch.float64))
    tried = attempt(partial(_gradients, bench, engine, danger, torch.float32))
    return compared_row(engine, expected, tried, reference=reference)


def _gradients(bench: LabBench, engine: str, danger: str, dtype: torch.dtype) -> Gradients:
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
