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
from collections.abc import Callable
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.lab.kit.bench import (
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
from explorer.lab.kit.checkpoints import WrittenOutCheckpoint
from explorer.lab.kit.nets import BATCH, WIDTH, Smooth, chain
from explorer.lab.kit.rows import DISTANCE, baseline_row, chart, compared_row, counted, outcome_sentence, series_of
from explorer.record.lab import LabRow
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


def n_checkpointed(mode: CheckpointMode, n_microbatches: int, *, training: bool) -> int:
    """How many microbatches a pipeline checkpoints: in eval mode none, whatever it was told."""
    if not training:
        return 0
    return {"always": n_microbatches, "except_last": n_microbatches - 1, "never": 0}[mode]


def split_run(
    model: nn.Sequential, x: Tensor, n_microbatches: int, run_block: Callable[[nn.Module, Tensor, int], Tensor]
) -> Tensor:
    """The outputs of all microbatches side by side; `run_block(block, part, i)` runs one block on microbatch i."""
    outputs = []
    for i, part in enumerate(x.tensor_split(n_microbatches)):
        for block in model:
            part = run_block(block, part, i)
        outputs.append(part)
    return torch.cat(outputs)


def run(setting: Setting, bench: LabBench) -> Answer:
    """Gradient and Hessian-vector product under always, except_last and never."""
    n, training = int(setting["microbatches"]), setting["mode"] == "train"
    model = chain(Smooth, 3).to(bench.device).train(training)
    x = bench.normal(BATCH, WIDTH)
    exact = copy.deepcopy(model).double()
    expected, product = _orders(model, x, _keep_blocks, 1)
    reference, reference_product = _orders(exact, x.double(), _keep_blocks, 1)
    assert not isinstance(product, Raised) and not isinstance(reference_product, Raised)
    rows = [baseline_row("full batch, nothing recomputed")]
    for done, mode in enumerate(MODES):
        bench.tell(mode, done, len(MODES))
        first = n_checkpointed(mode, n, training=training)
        run_block = partial(_checkpoint_block, setting["checkpoint"], first)
        gradient, second = _orders(model, x, run_block, n)
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


def _keep_blocks(block: nn.Module, part: Tensor, i: int) -> Tensor:
    return block(part)


def _checkpoint_block(how: str, n_first: int, block: nn.Module, part: Tensor, i: int) -> Tensor:
    """Recomputes `block` for the first `n_first` microbatches."""
    if i >= n_first:
        return block(part)
    if how == "torch":
        return checkpoint(block, part, use_reentrant=False)
    return WrittenOutCheckpoint.apply(block, None, part)


def _orders(
    model: nn.Sequential, x: Tensor, run_block: Callable[[nn.Module, Tensor, int], Tensor], n_microbatches: int
) -> tuple[Gradients, Gradients | Raised]:
    """The gradient, and the Hessian-vector product with a fixed direction, taken from backward(create_graph=True)."""
    model.zero_grad(set_to_none=True)
    mean_square(split_run(model, x.clone().requires_grad_(), n_microbatches, run_block)).backward(create_graph=True)
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
