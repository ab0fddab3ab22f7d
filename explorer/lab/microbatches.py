"""Microbatches: a pipeline's own checkpoint, second order through it, and what splitting a batch changes by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import (
    DISTANCE,
    Bench,
    Gradients,
    Raised,
    Setting,
    Shown,
    attempt,
    baseline_row,
    brief,
    compared_row,
    counted,
    gap,
    gradients_of,
    mean_square,
    measured,
    number,
    size_of,
    step_gradients,
)
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, block_names, chain
from explorer.record.lab import LabChart, LabRow, LabSeries
from explorer.record.pipeline_plan import CheckpointMode
from explorer.record.policy import KEEP_ALL, Policy

MODES: tuple[CheckpointMode, ...] = ("always", "except_last", "never")


class PipelineCheckpoint(torch.autograd.Function):
    """One operation whose backward runs the block again and pulls the gradient through in an inner backward.

    What the inner backward adds to `.grad` is numbers without a graph: that is the whole riddle.
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(leaf)
        torch.autograd.backward(output, gradient)
        return None, leaf.grad


def n_checkpointed(mode: CheckpointMode, n_microbatches: int, *, training: bool) -> int:
    """How many microbatches a pipeline checkpoints: in eval mode none, whatever it was told."""
    if not training:
        return 0
    return {"always": n_microbatches, "except_last": n_microbatches - 1, "never": 0}[mode]


def split_run(
    model: nn.Sequential, x: Tensor, n_microbatches: int, run: Callable[[nn.Module, Tensor, int], Tensor]
) -> Tensor:
    """The outputs of all microbatches side by side; `run(block, part, i)` carries out one block on microbatch i."""
    outputs = []
    for i, part in enumerate(x.tensor_split(n_microbatches)):
        for block in model:
            part = run(block, part, i)
        outputs.append(part)
    return torch.cat(outputs)


class Smooth(nn.Module):
    """Linear and tanh: something that has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def second_order(setting: Setting, bench: Bench) -> Shown:
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
        run = partial(_checkpoint_block, setting["checkpoint"], first)
        gradient, second = _orders(model, x, run, n)
        recomputed = counted("microbatches checkpointed", first)
        rows.append(compared_row(f"{mode}: gradient", expected, gradient, recomputed, reference=reference))
        rows.append(
            compared_row(f"{mode}: Hessian-vector product", product, second, recomputed, reference=reference_product)
        )
    chart = LabChart(
        kind="bars",
        title="How wrong are first and second order?",
        x_title="checkpoint mode (no bar: it raised)",
        y_title=DISTANCE,
        x=MODES,
        series=(
            LabSeries(name="gradient", y=tuple(number(row, DISTANCE) for row in rows[1::2]), part="baseline"),
            LabSeries(
                name="Hessian-vector product", y=tuple(number(row, DISTANCE) for row in rows[2::2]), part="candidate"
            ),
        ),
    )
    return Shown(tuple(rows), chart, tuple(_order_findings(rows, n)))


def _keep_blocks(block: nn.Module, part: Tensor, i: int) -> Tensor:
    return block(part)


def _checkpoint_block(how: str, n_first: int, block: nn.Module, part: Tensor, i: int) -> Tensor:
    """Recomputes `block` for the first `n_first` microbatches."""
    if i >= n_first:
        return block(part)
    if how == "torch":
        return checkpoint(block, part, use_reentrant=False)
    return PipelineCheckpoint.apply(block, part)


def _orders(
    model: nn.Sequential, x: Tensor, run: Callable[[nn.Module, Tensor, int], Tensor], n_microbatches: int
) -> tuple[Gradients, Gradients | Raised]:
    """The gradient, and the Hessian-vector product with a fixed direction, taken from backward(create_graph=True)."""
    model.zero_grad(set_to_none=True)
    mean_square(split_run(model, x.clone().requires_grad_(), n_microbatches, run)).backward(create_graph=True)
    gradient = gradients_of(model)
    product = attempt(partial(_product, model))
    model.zero_grad(set_to_none=True)  # a gradient with a graph holds the graph, which holds the parameter
    return gradient, product


def _product(model: nn.Module) -> Gradients:
    direction = torch.Generator().manual_seed(7)
    named = dict(model.named_parameters())
    terms = [
        (p.grad * torch.randn(p.shape, generator=direction).to(p)).sum() for p in named.values() if p.grad is not None
    ]
    found = torch.autograd.grad(torch.stack(terms).sum(), list(named.values()), allow_unused=True)
    return {name: None if g is None else g.detach().cpu() for name, g in zip(named, found)}


def _order_findings(rows: list[LabRow], n: int) -> list[str]:
    said = []
    for mode, gradient, product in zip(MODES, rows[1::2], rows[2::2]):
        n_again = gradient.value("microbatches checkpointed")
        if product.outcome == "raised":
            second = f"the Hessian-vector product raises ({product.note})"
        elif product.outcome in ("bitwise equal", "rounding"):
            second = f"the Hessian-vector product is right ({product.outcome})"
        else:
            second = f"the Hessian-vector product is silently wrong by {size_of(product)} of its size"
        said.append(f"{mode}: {n_again} of {n} microbatches checkpointed; gradient: {gradient.outcome}; {second}.")
    if any(row.outcome in ("different", "missing") for row in rows[2::2]):
        said.append(
            "The silent error: checkpointed microbatches add plain numbers to a gradient that has a graph from the "
            "others, so the second derivative sees the others alone."
        )
    return said


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": Normed,
    "dropout": partial(Dropped, 0.3),
    "layernorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
    "plain": Smooth,
}


def microbatching(setting: Setting, bench: Bench) -> Shown:
    """Full batch, microbatches, microbatches with recompute: gradients and running statistics of each."""
    n, make = int(setting["microbatches"]), LAYERS[setting["layer"]]
    x = bench.normal(BATCH, WIDTH)
    full, exact, split, again = (chain(make, 3).to(bench.device) for _ in range(4))
    expected = step_gradients(full, x)
    reference = step_gradients(exact.double(), x.double())
    bench.tell("microbatches", 1, 3)
    kept = _accumulated(split, x, n, KEEP_ALL)
    bench.tell("microbatches, recomputed", 2, 3)
    recomputed = _accumulated(again, x, n, Policy.recompute(block_names(again)))
    rows = (
        baseline_row("full batch"),
        compared_row("microbatches", expected, kept, *_statistics(full, split), reference=reference),
        compared_row("microbatches, recomputed", expected, recomputed, *_statistics(full, again), reference=reference),
        compared_row("recomputed against microbatches", kept, recomputed, *_statistics(split, again)),
    )
    chart = LabChart(
        kind="bars",
        title="What makes the difference: splitting or recomputing?",
        x_title="compared",
        y_title=DISTANCE,
        x=("splitting alone", "splitting and recomputing", "recomputing alone"),
        series=(LabSeries(name=DISTANCE, y=tuple(number(row, DISTANCE) for row in rows[1:]), part="candidate"),),
    )
    return Shown(rows, chart, tuple(_split_findings(rows)))


def _accumulated(model: nn.Sequential, x: Tensor, n_microbatches: int, policy: Policy) -> Gradients:
    """Gradients of the mean over the whole batch, one backward a microbatch, each weighted by its size."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with apply_policy(model, policy):
        for part in x.tensor_split(n_microbatches):
            (mean_square(model(part)) * (len(part) / len(x))).backward()
    return gradients_of(model)


def _statistics(expected: nn.Module, given: nn.Module) -> tuple[Any, ...]:
    pairs = zip(expected.named_buffers(), given.named_buffers())
    floating = [(name, a.cpu(), b.cpu()) for (name, a), (_, b) in pairs if a.is_floating_point()]
    if not floating:
        return ()
    moved = gap({name: a for name, a, _ in floating}, {name: b for name, _, b in floating})
    return (measured("running statistics off by", moved.distance),)


def _split_findings(rows: tuple[LabRow, ...]) -> list[str]:
    _, split, _, alone = rows
    said = [
        f"Splitting alone: {split.outcome}, off by {size_of(split)} of the gradient's size.",
        f"Recomputing alone: {alone.outcome}.",
    ]
    off = split.value("running statistics off by")
    if off is not None:
        said.append(
            f"Running statistics of the split run are off by {brief(float(off))}; recomputing adds "
            f"{brief(float(alone.value('running statistics off by') or 0.0))} to that."
        )
    if split.outcome == "different":
        said.append("So compare a recomputed pipeline with a microbatched baseline, not with the full batch.")
    else:
        said.append("Nothing in these blocks looks across the batch or draws random numbers, so splitting only rounds.")
    return said
