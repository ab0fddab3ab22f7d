"""Differentiating through backward.

Some losses contain a gradient: penalties, physics-informed nets, influence functions. Backward itself must then be
differentiable, and torch.autograd.grad must be able to ask for single gradients.

Each way of differentiating is tried plainly, non-reentrant and reentrant, with all blocks recomputed or only one of
them. An exception is the friendly outcome: it is the silent ones that cost weeks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Raised,
    Setting,
    attempt,
    gradients_by_name,
    gradients_of,
    mean_square,
)
from explorer.lab.kit.engines import ENGINES, engine_policy
from explorer.lab.kit.nets import BATCH, WIDTH, Smooth, chain
from explorer.lab.kit.rows import DISTANCE, baseline_row, compared_row, series_of, size_of
from explorer.lab.kit.second_order import hessian_product
from explorer.record.lab import LabChart, LabRow

THEME, PLACE = "Traps", 2
QUESTION = "Which checkpoint survives autograd.grad, a gradient penalty and a Hessian-vector product?"
SWITCHES = {
    "blocks": ("Which blocks are recomputed?", {"all": "All four", "first": "The first only", "last": "The last only"}),
}
WORDS = ("gradient penalty", "Hessian-vector product", "reentrant", "non-reentrant", "relative distance")


def run(setting: Setting, bench: LabBench) -> Answer:
    """autograd.grad, a gradient penalty and a Hessian-vector product, for each way of checkpointing."""
    blocks = {"all": [f"block{i}" for i in range(4)], "first": ["block0"], "last": ["block3"]}[setting["blocks"]]
    rows: list[LabRow] = []
    for done, (kind, differentiate) in enumerate(DERIVATIVES.items()):
        bench.tell(kind, done, len(DERIVATIVES))
        expected: Gradients = {}
        for engine in ENGINES:
            model = chain(Smooth, 4).to(bench.device)
            with apply_policy(model, engine_policy(engine, blocks)):
                tried = attempt(partial(differentiate, model, bench.normal(BATCH, WIDTH).requires_grad_()))
            if engine == "keep":
                assert not isinstance(tried, Raised)
                expected = tried
                rows.append(baseline_row(f"{kind}: keep"))
            else:
                rows.append(compared_row(f"{kind}: {engine}", expected, tried))
            model.zero_grad(set_to_none=True)
    chart = LabChart(
        kind="bars",
        title="How wrong is the result? (no bar: it raised)",
        x_title="what is computed",
        y_title=DISTANCE,
        x=tuple(DERIVATIVES),
        series=tuple(
            series_of(rows[offset::3], DISTANCE, "other", engine)
            for offset, engine in enumerate(ENGINES)
            if engine != "keep"
        ),
    )
    return Answer(tuple(rows), chart, tuple(_findings(rows)))


def _single_gradients(model: nn.Module, x: Tensor) -> Gradients:
    return gradients_by_name(mean_square(model(x)), model)


def _penalised(model: nn.Module, x: Tensor) -> Gradients:
    """Gradients of loss + |d loss / d x|^2."""
    loss = mean_square(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 1e4 * slope.square().sum()).backward()
    return gradients_of(model)


def _hessian_product(model: nn.Module, x: Tensor) -> Gradients:
    mean_square(model(x)).backward(create_graph=True)
    return hessian_product(model, lambda p: 1.0 + torch.arange(p.numel()).view_as(p).to(p) / p.numel())


DERIVATIVES: dict[str, Callable[[nn.Module, Tensor], Gradients]] = {
    "autograd.grad": _single_gradients,
    "gradient penalty": _penalised,
    "Hessian-vector product": _hessian_product,
}


def _findings(rows: list[LabRow]) -> list[str]:
    findings = []
    for engine in ("non-reentrant", "reentrant"):
        mine = {row.label.partition(":")[0]: row for row in rows if row.label.endswith(f": {engine}")}
        equal = [kind for kind, row in mine.items() if row.outcome == "bitwise equal"]
        raised = [kind for kind, row in mine.items() if row.outcome == "raised"]
        silent = [
            f"{kind} (by {size_of(row)})" for kind, row in mine.items() if row.outcome in ("different", "missing")
        ]
        parts = [
            f"{word} {', '.join(kinds)}"
            for word, kinds in (("bitwise equal for", equal), ("raises for", raised), ("silently wrong for", silent))
            if kinds
        ]
        findings.append(f"{engine.capitalize()}: {'; '.join(parts)}.")
    return findings
