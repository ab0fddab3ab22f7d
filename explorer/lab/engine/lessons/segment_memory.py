"""Memory of one store and of many.

The plain run keeps the saved activations of every step. A segmented run keeps the borders between segments, and the
saved activations of one segment at a time. Few segments are long; many segments have many borders. Somewhere between
lies the least.

A list of stores keeps the gradient of a shared weight once for every segment. The allocator's own events are added up
to a peak for each variant, together with torch's checkpoint of the same segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from explorer.engine.device.allocator import peak_bytes as peak_of
from explorer.engine.device.device import device_of
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting
from explorer.lab.engine.kit.nets import Recurrent
from explorer.lab.engine.kit.rows import baseline_row, chart, counted, line, measured, percent
from explorer.lab.engine.kit.segmented import checkpointed_loss, recurrent_chain, segmented_step
from explorer.lab.record import LabRow
from explorer.plan.sizes import mib

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


def run(setting: Setting, bench: LabBench) -> Answer:
    """Peak bytes against the number of segments: plain, one store, a list of stores, torch's checkpoint."""
    length = int(setting["length"])
    batch, width = (512, 32) if setting["batch"] == "large" else (4, 256)
    torch.manual_seed(0)
    net = Recurrent(width).to(bench.device)
    sequence = bench.normal(batch, length, width)
    chained, x = recurrent_chain(net, sequence), torch.zeros_like(sequence[:, 0])
    steps: dict[str, Callable[[int], object]] = {
        "one store": partial(segmented_step, chained, x),
        "list of stores": partial(segmented_step, chained, x, merge="per_segment"),
        "torch's checkpoint": lambda n: checkpointed_loss(chained, x, n).backward(),
    }
    chained.plain(x).backward()  # a first step may allocate what stays
    steps["torch's checkpoint"](2)
    net.zero_grad(set_to_none=True)
    plain = peak_bytes(lambda: chained.plain(x).backward(), bench)
    counts = [1, 2, 4, 8, length]
    peaks: dict[str, list[int]] = {label: [] for label in steps}
    for done, n in enumerate(counts):
        bench.tell(f"{n} segments", done, len(counts))
        for label, step in steps.items():
            net.zero_grad(set_to_none=True)
            peaks[label].append(peak_bytes(partial(step, n), bench))
    rows = (
        baseline_row("plain", measured(PEAK, plain, "bytes")),
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
    return peak_of(replace(recorder.log, base_bytes=None), 0)


def _row(label: str, counts: list[int], peaks: list[int]) -> LabRow:
    least = min(peaks)
    return LabRow(
        label=label,
        outcome="shown",
        figures=(measured(PEAK, least, "bytes"), counted("segments at the least peak", counts[peaks.index(least)])),
        note="the least of all numbers of segments",
    )


def _findings(plain: int, counts: list[int], peaks: dict[str, list[int]]) -> list[str]:
    merged, many, torchs = peaks.values()
    least = min(merged)
    closest = max(abs(a - b) / b for a, b in zip(merged, torchs))
    extra = many[-1] - merged[-1]
    return [
        f"The plain run peaks at {mib(plain)}. One store needs least with {counts[merged.index(least)]} segments: "
        f"{mib(least)}.",
        f"Over all numbers of segments torch's own checkpoint is at most {percent(closest)} away from the one store: "
        f"it holds the same things.",
        f"With {counts[-1]} segments a list of stores needs {mib(extra)} more than one store "
        f"({percent(extra / merged[-1])}): one gradient of every shared weight a segment, if the list fills before "
        "the peak.",
    ]
