"""Microbatching is not checkpointing.

Pipelines and gradient accumulation cut the batch into microbatches; checkpointing usually comes along. When the
result differs from the full batch, checkpointing is easily blamed.

Three runs tell them apart: the full batch, microbatches without recompute, and microbatches with recompute. BatchNorm
normalises with the numbers of its own microbatch, and dropout draws its masks in a different order. Neither has
anything to do with recomputing. Microbatch gradients are weighted by size, so uneven ones count fairly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Setting,
    gradients_of,
    mean_square,
    step_gradients,
)
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Dropped, Normed, Smooth, block_names, chain
from explorer.lab.engine.kit.rows import (
    DISTANCE,
    baseline_row,
    chart,
    compared_row,
    gap,
    measured,
    outcome_sentence,
    series_of,
    size_of,
)
from explorer.lab.record import LabFigure, LabRow
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Microbatches and second order", 2
QUESTION = "A split and checkpointed run differs from the plain one. Who is to blame?"
SWITCHES = {
    "layer": (
        "What is in the blocks?",
        {"batchnorm": "BatchNorm", "dropout": "Dropout", "layernorm": "LayerNorm", "plain": "Linear layers only"},
    ),
    "microbatches": ("How many microbatches?", {"4": "4", "2": "2", "3": "3"}),
}
WORDS = ("microbatch", "recompute", "running statistics", "mask", "rounding", "cosine")

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": Normed,
    "dropout": partial(Dropped, 0.3),
    "layernorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
    "plain": Smooth,
}
STATISTICS = "running statistics off by"


def run(setting: Setting, bench: LabBench) -> Answer:
    """Full batch, microbatches, microbatches with recompute: gradients and running statistics of each."""
    n, make = int(setting["microbatches"]), LAYERS[setting["layer"]]
    x = bench.normal(BATCH, WIDTH)
    full, exact, split, again = (chain(make, 3).to(bench.device) for _ in range(4))
    expected = step_gradients(full, x)
    reference = step_gradients(exact.double(), x.double())
    bench.tell("microbatches", 1, 3)
    without = _accumulated(split, x, n, KEEP_ALL)
    bench.tell("microbatches, recomputed", 2, 3)
    recomputed = _accumulated(again, x, n, Policy.recompute(block_names(again)))
    rows = (
        baseline_row("full batch"),
        compared_row("microbatches", expected, without, *_statistics(full, split), reference=reference),
        compared_row("microbatches, recomputed", expected, recomputed, *_statistics(full, again), reference=reference),
        compared_row("recomputed against microbatches", without, recomputed, *_statistics(split, again)),
    )
    titles = ("What makes the difference: splitting or recomputing?", "compared", DISTANCE)
    x_names = ("splitting alone", "splitting and recomputing", "recomputing alone")
    return Answer(rows, chart("bars", titles, x_names, [series_of(rows[1:], DISTANCE)]), tuple(_findings(rows)))


def _accumulated(model: nn.Sequential, x: Tensor, n_microbatches: int, policy: Policy) -> Gradients:
    """Gradients of the mean over the whole batch, one backward a microbatch, each weighted by its size."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with apply_policy(model, policy):
        for part in x.tensor_split(n_microbatches):
            (mean_square(model(part)) * (len(part) / len(x))).backward()
    return gradients_of(model)


def _statistics(expected: nn.Module, model: nn.Module) -> tuple[LabFigure, ...]:
    before, after = _floating_buffers(expected), _floating_buffers(model)
    return (measured(STATISTICS, gap(before, after).distance),) if before else ()


def _floating_buffers(model: nn.Module) -> Gradients:
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _findings(rows: tuple[LabRow, ...]) -> list[str]:
    _, split, _, alone = rows
    moved = ""
    if split.value(STATISTICS) is not None:
        moved = f"running statistics off by {size_of(split, STATISTICS)}, recomputing adds {size_of(alone, STATISTICS)}"
    return [
        outcome_sentence(split, moved),
        outcome_sentence(alone),
        "So compare a recomputed pipeline with a microbatched baseline, not with the full batch."
        if split.outcome == "different"
        else "Nothing in these blocks looks across the batch or draws random numbers, so splitting only rounds.",
    ]
