"""Traps: inputs without gradient, differentiated backward, tensors in tuples, recomputes that end early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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
    compared_row,
    counted,
    gradients_of,
    mean_square,
    number,
    size_of,
)
from explorer.lab.kit.nets import BATCH, WIDTH, chain
from explorer.lab.microbatches import Smooth
from explorer.lab.wrapping import ENGINES, engine_policy
from explorer.record.lab import LabChart, LabFigure, LabRow, LabSeries
from explorer.record.policy import Policy

MISSING = "parameters without a gradient"


def no_grad_input(setting: Setting, bench: Bench) -> Shown:
    """Which parameters get a gradient, depending on what enters the first recomputed block."""
    blocks = [f"block{i}" for i in range(3)][: 3 if setting["blocks"] == "all" else 1]
    rows: list[LabRow] = []
    expected: Gradients = {}
    for done, engine in enumerate(ENGINES):
        bench.tell(engine, done, len(ENGINES))
        model = chain(Smooth, 3).to(bench.device)
        with apply_policy(model, engine_policy(engine, blocks)):
            found = attempt(partial(_fed_step, model, setting["input"], bench))
        if engine == "keep":
            assert not isinstance(found, Raised)
            expected = found
            rows.append(baseline_row("keep", counted(MISSING, _n_missing(found))))
        else:
            rows.append(compared_row(engine, expected, found, counted(MISSING, _n_missing(found))))
    chart = LabChart(
        kind="bars",
        title="How many of the parameters get no gradient?",
        x_title="checkpoint",
        y_title=MISSING,
        x=tuple(ENGINES),
        series=(LabSeries(name=MISSING, y=tuple(float(row.value(MISSING) or 0) for row in rows), part="candidate"),),
    )
    return Shown(tuple(rows), chart, tuple(_missing_findings(rows, len(expected))))


def _fed_step(model: nn.Module, source: str, bench: Bench) -> Gradients:
    x = bench.normal(BATCH, WIDTH)
    if source == "asked":
        x.requires_grad_()
    elif source == "trained":
        x = x * torch.ones(WIDTH, device=bench.device, requires_grad=True)
    mean_square(model(x)).backward()
    return gradients_of(model)


def _n_missing(found: Gradients | Raised) -> int:
    """A backward that raised gave nobody a gradient: 6 parameters in 3 blocks."""
    return 6 if isinstance(found, Raised) else sum(gradient is None for gradient in found.values())


def _missing_findings(rows: list[LabRow], n_parameters: int) -> list[str]:
    said = []
    for row in rows[1:]:
        if row.outcome == "raised":
            said.append(f"{row.label.capitalize()}: backward raises ({row.note}); nothing trains.")
        elif row.outcome == "missing":
            said.append(
                f"{row.label.capitalize()}: {row.value(MISSING)} of {n_parameters} parameters silently get no gradient "
                f"and never train."
            )
        else:
            said.append(f"{row.label.capitalize()}: gradients are {row.outcome}.")
    return said


def gradient_penalty(setting: Setting, bench: Bench) -> Shown:
    """autograd.grad, a gradient penalty and a Hessian-vector product, for each way of checkpointing."""
    blocks = {"all": [f"block{i}" for i in range(4)], "first": ["block0"], "last": ["block3"]}[setting["blocks"]]
    rows: list[LabRow] = []
    for done, (kind, differentiate) in enumerate(DERIVATIVES.items()):
        bench.tell(kind, done, len(DERIVATIVES))
        expected: Gradients = {}
        for engine in ENGINES:
            model = chain(Smooth, 4).to(bench.device)
            with apply_policy(model, engine_policy(engine, blocks)):
                found = attempt(partial(differentiate, model, bench.normal(BATCH, WIDTH).requires_grad_()))
            if engine == "keep":
                assert not isinstance(found, Raised)
                expected = found
                rows.append(baseline_row(f"{kind}: keep"))
            else:
                rows.append(compared_row(f"{kind}: {engine}", expected, found))
            model.zero_grad(set_to_none=True)
    chart = LabChart(
        kind="bars",
        title="How wrong is the result? (no bar: it raised)",
        x_title="what is computed",
        y_title=DISTANCE,
        x=tuple(DERIVATIVES),
        series=tuple(
            LabSeries(name=engine, y=tuple(number(row, DISTANCE) for row in rows[offset::3]))
            for offset, engine in enumerate(ENGINES)
            if engine != "keep"
        ),
    )
    return Shown(tuple(rows), chart, tuple(_penalty_findings(rows)))


def _single_gradients(model: nn.Module, x: Tensor) -> Gradients:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(mean_square(model(x)), list(named.values()))
    return {name: None if g is None else g.detach().cpu() for name, g in zip(named, found)}


def _penalised(model: nn.Module, x: Tensor) -> Gradients:
    """Gradients of loss + |d loss / d x|^2."""
    loss = mean_square(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 1e4 * slope.square().sum()).backward()
    return gradients_of(model)


def _hessian_product(model: nn.Module, x: Tensor) -> Gradients:
    mean_square(model(x)).backward(create_graph=True)
    weighted = [
        (p.grad * (1.0 + torch.arange(p.numel()).view_as(p).to(p) / p.numel())).sum()
        for p in model.parameters()
        if p.grad is not None
    ]
    named = dict(model.named_parameters())
    found = torch.autograd.grad(torch.stack(weighted).sum(), list(named.values()), allow_unused=True)
    return {name: None if g is None else g.detach().cpu() for name, g in zip(named, found)}


DERIVATIVES: dict[str, Callable[[nn.Module, Tensor], Gradients]] = {
    "autograd.grad": _single_gradients,
    "gradient penalty": _penalised,
    "Hessian-vector product": _hessian_product,
}


def _penalty_findings(rows: list[LabRow]) -> list[str]:
    said = []
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
        said.append(f"{engine.capitalize()}: {'; '.join(parts)}.")
    return said


class Shift(nn.Module):
    """Adds a bias: its backward needs no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


LAST: dict[str, Callable[[], nn.Module]] = {"linear": partial(nn.Linear, WIDTH, WIDTH), "relu": nn.ReLU, "add": Shift}
BEGUN, ENDED = "forwards begun", "forwards ended"


def early_stop(setting: Setting, bench: Bench) -> Shown:
    """How often each layer of a recomputed block runs in one step."""
    policy = Policy.recompute(["block"], early_stop=setting["early_stop"] == "on")
    plain, model = (_layered(setting["last"]).to(bench.device) for _ in range(2))
    expected = _counted_step(plain, bench)[0]
    with apply_policy(model, policy):
        found, calls = _counted_step(model, bench)
    layers = [name for name, _ in model.get_submodule("block").named_children()]
    rows = (
        baseline_row("kept"),
        compared_row("recomputed", expected, found),
        *(LabRow(label=name, outcome="shown", figures=calls[name].figures()) for name in layers),
    )
    chart = LabChart(
        kind="bars",
        title="How often does each layer run in one step?",
        x_title="layer of the block",
        y_title="forwards in one step",
        x=tuple(layers),
        series=(
            LabSeries(name=BEGUN, y=tuple(float(calls[name].begun) for name in layers)),
            LabSeries(name=ENDED, y=tuple(float(calls[name].ended) for name in layers), part="recompute"),
        ),
    )
    twice = [name for name in layers if calls[name].ended == 2]
    broken = [name for name in layers if calls[name].begun > calls[name].ended]
    skipped = [name for name in layers if calls[name].begun == 1]
    findings = (
        f"Ran to their end twice: {', '.join(twice) or 'no layer'}. Left in the middle of the rerun: "
        f"{', '.join(broken) or 'none'}. Not reached by the rerun: {', '.join(skipped) or 'none'}.",
        f"Gradients are {rows[1].outcome}"
        + (": what was left out, backward never reads." if broken or skipped else "; the whole block ran again."),
    )
    return Shown(rows, chart, findings)


def _layered(last: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict[str, nn.Module](first=nn.Linear(WIDTH, WIDTH), gelu=nn.GELU(), middle=nn.Linear(WIDTH, WIDTH))
    layers["last"] = LAST[last]()
    return nn.Sequential(OrderedDict[str, nn.Module](block=nn.Sequential(layers), head=nn.Linear(WIDTH, WIDTH)))


@dataclass
class Calls:
    """Forwards of one layer; a rerun that stops early leaves its last layer begun and not ended."""

    begun: int = 0
    ended: int = 0

    def begin(self, *hook_arguments: Any) -> None:
        self.begun += 1

    def end(self, *hook_arguments: Any) -> None:
        self.ended += 1

    def figures(self) -> tuple[LabFigure, ...]:
        return counted(BEGUN, self.begun), counted(ENDED, self.ended)


def _counted_step(model: nn.Module, bench: Bench) -> tuple[Gradients, dict[str, Calls]]:
    """Gradients, and the forwards of each layer of the block."""
    calls: dict[str, Calls] = {}
    for name, layer in model.get_submodule("block").named_children():
        calls[name] = Calls()
        layer.register_forward_pre_hook(calls[name].begin)
        layer.register_forward_hook(calls[name].end)
    mean_square(model(bench.normal(BATCH, WIDTH))).backward()
    return gradients_of(model), calls
