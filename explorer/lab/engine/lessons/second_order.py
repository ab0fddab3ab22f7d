"""The riddle of the wrong Hessian.

A pipeline cuts the batch into microbatches and checkpoints always, except_last or never. Its checkpoint is reentrant:
the block becomes one operation whose backward runs an inner backward. A gradient that comes out of an inner backward
is a plain number, with no graph behind it.

A Hessian-vector product differentiates the gradient. Here the gradient is taken with a graph (create_graph=True) and
differentiated again. The reentrant checkpoint is a small one of the lab's own that follows the pipeline's rules: the
last microbatch is exempt under except_last, and in eval mode nothing is checkpointed at all. The number of
checkpointed microbatches is counted, not assumed.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Raised,
    Setting,
    attempt,
    gradients_of,
    hessian_product,
    mean_square,
)
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Smooth, WrittenOutCheckpoint, chain
from explorer.lab.engine.kit.rows import (
    DISTANCE,
    baseline_row,
    chart,
    compared_row,
    counted,
    outcome_sentence,
    series_of,
)
from explorer.lab.record import LabRow
from explorer.record.run import CheckpointMode

THEME, PLACE = "Microbatches and second order", 1
QUESTION = "First-order gradients are right. Why is the Hessian-vector product wrong, and only sometimes?"
SWITCHES = {
    "checkpoint": (
        "How are microbatches checkpointed?",
        {"pipeline": "The pipeline's way (reentrant)", "torch": "torch's non-reentrant checkpoint"},
    ),
    "microbatches": ("How many microbatches?", {"2": "2", "1": "1", "4": "4"}),
    "mode": ("In which mode is the model?", {"train": "train", "eval": "eval"}),
}
WORDS = (
    "microbatch",
    "always / except_last / never",
    "Hessian-vector product",
    "reentrant",
    "non-reentrant",
    "relative distance",
)

MODES: tuple[CheckpointMode, ...] = ("always", "except_last", "never")
DIRECTION = 7
"""Seed of the direction of the Hessian-vector product."""


def run(setting: Setting, bench: LabBench) -> Answer:
    """Gradient and Hessian-vector product under always, except_last and never."""
    n, training = int(setting["microbatches"]), setting["mode"] == "train"
    model = chain(Smooth, 3).to(bench.device).train(training)
    x = bench.normal(BATCH, WIDTH)
    exact = copy.deepcopy(model).double()
    expected, product = _orders(model, x, "torch", (0, 1))
    reference, reference_product = _orders(exact, x.double(), "torch", (0, 1))
    assert not isinstance(product, Raised) and not isinstance(reference_product, Raised)
    rows = [baseline_row("full batch, nothing recomputed")]
    for done, mode in enumerate(MODES):
        bench.tell(mode, done, len(MODES))
        first = {"always": n, "except_last": n - 1, "never": 0}[mode] if training else 0
        gradient, second = _orders(model, x, setting["checkpoint"], (first, n))
        recomputed = counted("microbatches checkpointed", first)
        rows.append(compared_row(f"{mode}: gradient", expected, gradient, recomputed, reference=reference))
        rows.append(
            compared_row(f"{mode}: Hessian-vector product", product, second, recomputed, reference=reference_product)
        )
    titles = ("How wrong are first and second order?", "checkpoint mode (no bar: it raised)", DISTANCE)
    series = (
        series_of(rows[1::2], DISTANCE, "baseline", "gradient"),
        series_of(rows[2::2], DISTANCE, name="Hessian-vector product"),
    )
    return Answer(tuple(rows), chart("bars", titles, MODES, series), tuple(_findings(rows)))


def _orders(model: nn.Sequential, x: Tensor, how: str, parts: tuple[int, int]) -> tuple[Gradients, Gradients | Raised]:
    """The gradient, and the Hessian-vector product with a fixed direction, taken from backward(create_graph=True).

    `parts`: checkpointed microbatches, which come first, and all microbatches.
    """
    n_checkpointed, n_microbatches = parts
    outputs = []
    for i, part in enumerate(x.clone().requires_grad_().tensor_split(n_microbatches)):
        for block in model:
            if i >= n_checkpointed:
                part = block(part)
            elif how == "torch":
                part = checkpoint(block, part, use_reentrant=False)
            else:
                part = WrittenOutCheckpoint.apply(block, None, part)
        outputs.append(part)
    model.zero_grad(set_to_none=True)
    mean_square(torch.cat(outputs)).backward(create_graph=True)
    gradient = gradients_of(model)
    product = attempt(partial(hessian_product, model, DIRECTION))
    model.zero_grad(set_to_none=True)  # a gradient with a graph holds the graph, which holds the parameter
    return gradient, product


def _findings(rows: list[LabRow]) -> list[str]:
    findings = []
    for mode, gradient, product in zip(MODES, rows[1::2], rows[2::2]):
        n_again = f"microbatches checkpointed: {gradient.value('microbatches checkpointed')}"
        findings.append(outcome_sentence(replace(gradient, label=f"first order, {mode}"), n_again))
        findings.append(outcome_sentence(replace(product, label=f"second order, {mode}")))
    if any(row.outcome in ("different", "missing") for row in rows[2::2]):
        findings.append(
            "The silent error: checkpointed microbatches add plain numbers to a gradient that has a graph from the "
            "others, so the second derivative sees the others alone."
        )
    return findings
