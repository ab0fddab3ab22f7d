"""Runs what may kill its process in a process of its own, and reports how that process ended.

parent ── python -m explorer.engine.lab.risky DANGER ENGINE DEVICE ──▶ child
       ◀── one LabRow as JSON, or a signal, or silence ───────────────
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.engine.lab.bench import Bench, Gradients, attempt, compared_row, gradients_of, mean_square
from explorer.engine.lab.nets import BATCH, WIDTH
from explorer.record.base import from_json, to_json
from explorer.record.lab import LabRow

TIME_LIMIT_S = 60.0
ENGINES = ("non-reentrant", "reentrant")


def danger_rows(danger: str, bench: Bench) -> Iterator[LabRow]:
    """One row a checkpoint; the children run side by side. A cancel ends them."""
    children = [_Child(danger, engine, bench.device) for engine in ENGINES]
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
            bench.tell("waiting for two processes", sum(child.process.poll() is not None for child in children), 2)
            time.sleep(0.05)
        yield from [child.row() for child in children]
    finally:
        for child in children:
            child.end()


class _Child:
    def __init__(self, danger: str, engine: str, device: torch.device) -> None:
        root = str(Path(explorer.__file__).resolve().parent.parent)
        path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)
        self._label = engine
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "explorer.engine.lab.risky", danger, engine, device.type],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )

    def row(self) -> LabRow:
        """What the child found, or how it died."""
        code = self.process.poll()
        if code == 0:
            self._said.seek(0)
            return from_json(self._said.read(), LabRow)
        if code is None:
            note = f"no answer within {TIME_LIMIT_S:g} s"
        elif code < 0:
            note = f"its process was ended by {signal.Signals(-code).name}"
        else:
            note = f"its process ended with exit code {code}"
        return LabRow(label=self._label, outcome="crashed", note=note)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._said.close()


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


class FaultyBlock(ArgumentBlock):
    """Ends its process when it runs a second time, as a fault in compiled code would."""

    n_forwards = 0

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:  # type: ignore[override]
        self.n_forwards += 1
        if self.n_forwards > 1:
            signal.raise_signal(signal.SIGSEGV)
        return super().forward(x, *skips)


BLOCKS: dict[str, type[TupleBlock]] = {"tuple": TupleBlock, "arguments": ArgumentBlock, "fault": FaultyBlock}


def run_here(danger: str, engine: str, device: torch.device) -> LabRow:
    """The row of one checkpoint, computed in this very process."""
    expected = _gradients(danger, "keep", device)
    return compared_row(engine, expected, attempt(partial(_gradients, danger, engine, device)))


def _gradients(danger: str, engine: str, device: torch.device) -> Gradients:
    """Three blocks, each of which also gets the outputs of all before it."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(BLOCKS[danger]() for _ in range(3)).to(device)
    x = Bench(device).normal(BATCH, WIDTH).requires_grad_()
    skips: list[Tensor] = []
    for block in blocks:
        arguments = (tuple(skips),) if danger == "tuple" else tuple(skips)
        if engine == "keep":
            x = block(x, *arguments)
        else:
            x = checkpoint(block, x, *arguments, use_reentrant=engine == "reentrant")
        skips.append(x)
    mean_square(x).backward()
    return gradients_of(blocks)


def main() -> None:
    """The child's side."""
    danger, engine, device = sys.argv[1:]
    torch.set_num_threads(1)
    sys.stdout.buffer.write(to_json(run_here(danger, engine, torch.device(device))))


if __name__ == "__main__":
    main()
