"""Memory of one store and of many.

The plain run keeps the saved activations of every step. A segmented run keeps the borders between segments, and the
saved activations of one segment at a time. Few segments are long; many segments have many borders. Somewhere between
lies the least.

A list of stores keeps the gradient of a shared weight once for every segment. The allocator's own events are added up
to a peak for each variant, together with torch's checkpoint of the same segments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from explorer.engine.device.allocator import AllocatorLog, lifetimes
from explorer.engine.device.device import device_of
from explorer.lab.kit.bench import Answer, LabBench, Setting
from explorer.lab.kit.nets import Recurrent
from explorer.lab.kit.rows import baseline_row, chart, counted, line, measured, percent
from explorer.lab.kit.segmented import Chain, Merge, checkpointed_loss, recurrent_chain, segmented_step
from explorer.record.lab import LabFigure, LabRow

THEME, PLACE = "Segments and gradient stores", 3
QUESTION = "How much memory does a segmented step need, and what does a list of stores add?"
SWITCHES = {
    "length": ("How long is the sequence?", {"32": "32", "16": "16", "64": "64"}),
    "batch": (
        "What is large?",
        {"large": "The batch: activations dominate", "small": "The weights: gradients dominate"},
    ),
}
WORDS = ("saved activations", "segment", "store", "recompute")

PEAK = "peak"
MIB = 2**20


def run(setting: Setting, bench: LabBench) -> Answer:
    """Peak bytes against the number of segments: plain, one store, a list of stores, torch's checkpoint."""
    length = int(setting["length"])
    batch, width = (512, 32) if setting["batch"] == "large" else (4, 256)
    torch.manual_seed(0)
    net = Recurrent(width).to(bench.device)
    sequence = bench.normal(batch, length, width)
    chained, x = recurrent_chain(net, sequence), torch.zeros_like(sequence[:, 0])
    for once in (_plain, partial(_checkpointed, n_segments=2)):  # a first step may allocate what stays
        once(chained, x)
    plain = peak_bytes(partial(_plain, chained, x), bench)
    counts = [1, 2, 4, 8, length]
    peaks: dict[str, list[int]] = {"one store": [], "list of stores": [], "torch's checkpoint": []}
    for done, n in enumerate(counts):
        bench.tell(f"{n} segments", done, len(counts))
        steps: tuple[Callable[[], object], ...] = (
            partial(_segmented, chained, x, n, "add"),
            partial(_segmented, chained, x, n, "per_segment"),
            partial(_checkpointed, chained, x, n),
        )
        for values, step in zip(peaks.values(), steps):
            values.append(peak_bytes(step, bench))
    rows = (
        baseline_row("plain", _bytes(PEAK, plain)),
        *(_row(label, counts, values) for label, values in peaks.items()),
    )
    titles = (
        "How much memory does the step hold at its peak?",
        "number of segments",
        "peak, beyond weights and batch",
    )
    series = [line("plain", [plain] * len(counts), "baseline"), *(line(label, peaks[label]) for label in peaks)]
    drawn = chart("lines", titles, map(str, counts), series, "bytes")
    return Answer(rows, drawn, tuple(_findings(plain, counts, peaks)))


def peak_bytes(step: Callable[[], object], bench: LabBench) -> int:
    """Most bytes held at once of those that were allocated during `step`."""
    recorder = device_of(bench.device).recorder()
    with recorder:
        result = step()
    del result
    return peak_of(recorder.log)


def peak_of(log: AllocatorLog) -> int:
    """Highest sum of the blocks born in `log`, over its events."""
    alive = lifetimes(log)
    deltas = np.zeros(len(log.n_bytes) + 1, dtype=np.int64)
    sizes = log.n_bytes[alive.born]
    np.add.at(deltas, alive.born, sizes)
    np.add.at(deltas, alive.died, -sizes)
    return int(deltas[:-1].cumsum().max(initial=0))


def _plain(chained: Chain, x: torch.Tensor) -> None:
    chained.model.zero_grad(set_to_none=True)
    chained.plain(x).backward()


def _checkpointed(chained: Chain, x: torch.Tensor, n_segments: int) -> None:
    chained.model.zero_grad(set_to_none=True)
    checkpointed_loss(chained, x, n_segments).backward()


def _segmented(chained: Chain, x: torch.Tensor, n_segments: int, merge: Merge) -> object:
    chained.model.zero_grad(set_to_none=True)
    return segmented_step(chained, x, n_segments, merge)


def _bytes(name: str, n_bytes: int) -> LabFigure:
    return measured(name, n_bytes, "bytes")


def _row(label: str, counts: list[int], peaks: list[int]) -> LabRow:
    least = min(peaks)
    return LabRow(
        label=label,
        outcome="shown",
        figures=(_bytes(PEAK, least), counted("segments at the least peak", counts[peaks.index(least)])),
        note="the least of all numbers of segments",
    )


def _findings(plain: int, counts: list[int], peaks: dict[str, list[int]]) -> list[str]:
    merged, many, torchs = peaks.values()
    least = min(merged)
    n_best = counts[merged.index(least)]
    closest = max(abs(a - b) / b for a, b in zip(merged, torchs))
    extra = many[-1] - merged[-1]
    helps = "Cutting helps" if least < plain else "Cutting does not help"
    return [
        f"{helps}: the least peak with one store is {least / MIB:.2f} MiB, at {n_best} "
        f"segment{'s' if n_best > 1 else ''}; the plain run's is {plain / MIB:.2f} MiB.",
        f"Over all numbers of segments torch's own checkpoint is at most {percent(closest)} away from the one store: "
        f"it holds the same things.",
        f"With {counts[-1]} segments a list of stores needs {extra / MIB:.2f} MiB more than one store "
        f"({percent(extra / merged[-1])})"
        + (
            ": one gradient of every shared weight a segment."
            if extra
            else ": its peak comes before the list has filled."
        ),
    ]
