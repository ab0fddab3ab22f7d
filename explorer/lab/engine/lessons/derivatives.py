"""Which derivative survives which checkpoint.

Some losses contain a gradient: penalties, physics-informed nets, influence functions. Backward itself must then be
differentiable, and torch.autograd.grad must be able to ask for single gradients.

Seven ways to differentiate one model are tried. Its blocks are kept, recomputed, recomputed by torch's reentrant
checkpoint, or recomputed but for their matrix products (selective checkpointing). Each result is compared with the
result of the model that keeps everything. An exception is the friendly outcome: a silent error costs weeks.

The reentrant runs have a process of their own each, because a reentrant backward can end the interpreter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.bench.step import Trainee, autocast, forward_backward, prepare
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.state.global_state import deterministic_kernels
from explorer.engine.state.rng import seed_everything
from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Raised,
    Setting,
    attempt,
    gradients_of,
    hessian_product,
    row_of_process,
)
from explorer.lab.engine.kit.rows import DISTANCE, baseline_row, chart, compared_row, series_of, size_of
from explorer.lab.record import LabRow
from explorer.plan.names import products_kept
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

THEME, PLACE = "Traps", 2
QUESTION = "Which checkpoint survives autograd.grad, a gradient penalty and a Hessian-vector product?"
SWITCHES = {
    "blocks": ("Which blocks are recomputed?", {"all": "All", "first": "The first only", "last": "The last only"}),
}
WORDS = ("gradient penalty", "Hessian-vector product", "reentrant", "non-reentrant", "relative distance")
TAKES_MODEL = True

MODEL = ModelRef(
    target="sample_models/gpt.py",
    arguments={
        "n_layers": 2, "width": 16, "n_heads": 2, "length": 8, "batch": 2, "vocabulary": 32, "dropout": 0.1,
    },
)  # fmt: skip
"""Model of the lesson where no other is named."""


def run(setting: Setting, bench: LabBench) -> Answer:
    """Seven derivatives, for each way of checkpointing the repeated blocks of a model."""
    spec = RunSpec(model=bench.model or MODEL, device="cuda" if bench.device.type == "cuda" else "cpu")
    graph = describe(spec.model, seed=spec.seed, device=spec.device, conditions=spec.conditions)
    blocks = {"all": graph.repeats, "first": graph.repeats[:1], "last": graph.repeats[-1:]}[setting["blocks"]]
    loaded = load_for(spec)
    rows: list[LabRow] = []
    for done, derivative in enumerate(DERIVATIVES):
        bench.tell(derivative, done, len(DERIVATIVES))
        rows += _rows(spec, loaded, derivative, checkpoints(blocks, graph), bench)
    n_ways = len(rows) // len(DERIVATIVES)
    series = (series_of(rows[i::n_ways], DISTANCE, "other", _way(rows[i])) for i in range(1, n_ways))
    titles = ("How wrong is the result? (no bar: it raised)", "what is computed", DISTANCE)
    return Answer(tuple(rows), chart("bars", titles, DERIVATIVES, series), tuple(_findings(rows)))


def checkpoints(blocks: tuple[str, ...], graph: ModelGraph) -> dict[str, Policy]:
    """Policies by the name of their checkpoint; all of them recompute `blocks`."""
    selective = Policy(units=tuple(products_kept((fqn,), graph) for fqn in blocks))
    return {
        "non-reentrant": Policy.recompute(blocks),
        "reentrant": Policy.recompute(blocks, use_reentrant=True),
        "selective": selective,
    }


def _rows(
    spec: RunSpec, loaded: Loaded, derivative: str, policies: Mapping[str, Policy], bench: LabBench
) -> list[LabRow]:
    expected = derive(spec, loaded, derivative)
    label = f"{derivative}: keep"
    if isinstance(expected, Raised):
        return [LabRow(label=label, outcome="raised", note=str(expected))] + [
            LabRow(label=f"{derivative}: {way}", outcome="shown", note="keep itself raises") for way in policies
        ]
    rows = [baseline_row(label)]
    for way, policy in policies.items():
        policed = replace(spec, policy=policy)
        label = f"{derivative}: {way}"
        if way == "reentrant":
            rows.append(row_of_process(trial, bench, label, derivative, policed))
        else:
            rows.append(judged(policed, loaded, label, derivative, expected))
    return rows


def trial(bench: LabBench, label: str, derivative: str, spec: RunSpec) -> LabRow:
    """The row of one policy, in a process of its own: the model is loaded and differentiated with everything kept."""
    loaded = load_for(spec)
    expected = derive(replace(spec, policy=Policy()), loaded, derivative)
    assert not isinstance(expected, Raised), "the parent differentiated the same model"
    return judged(spec, loaded, label, derivative, expected)


def judged(spec: RunSpec, loaded: Loaded, label: str, derivative: str, expected: Gradients) -> LabRow:
    """The row of one policy against `kept`; a float64 reference is derived only where they differ."""
    tried = derive(spec, loaded, derivative)
    row = compared_row(label, expected, tried)
    if row.outcome != "different":
        return row
    exact = derive(replace(spec, policy=Policy(), dtype="float64"), loaded, derivative)
    return compared_row(label, expected, tried, reference=None if isinstance(exact, Raised) else exact)


def derive(spec: RunSpec, loaded: Loaded, derivative: str) -> Gradients | Raised:
    """What `derivative` yields for a fresh copy of the model under `spec`'s policy, or what it raised."""
    with deterministic_kernels(), warnings.catch_warnings():
        # torch warns of the cycle between parameter and gradient; the copy is dropped at once.
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        return attempt(lambda: DERIVATIVES[derivative](prepare(spec, loaded)))


def backward(trainee: Trainee) -> Gradients:
    """loss.backward()"""
    forward_backward(trainee)
    return gradients_of(trainee.model)


def autograd_grad(trainee: Trainee) -> Gradients:
    """torch.autograd.grad(loss, parameters)"""
    named = {name: p for name, p in trainee.model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(_loss(trainee), list(named.values()), allow_unused=True)
    return {name: None if g is None else g.detach().cpu() for name, g in zip(named, gradients)}


def backward_twice(trainee: Trainee) -> Gradients:
    """loss.backward(retain_graph=True), then loss.backward(): gradients add up to twice the first."""
    loss = _loss(trainee)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(trainee.model)


def create_graph(trainee: Trainee) -> Gradients:
    """loss.backward(create_graph=True): gradients with a graph of their own, the entrance to second order."""
    _loss(trainee).backward(create_graph=True)
    return _taken(trainee)


def hessian_vector_product(trainee: Trainee) -> Gradients:
    """H v for a fixed random v: backward(create_graph=True), then the gradient of gradient · v."""
    _loss(trainee).backward(create_graph=True)
    return hessian_product(trainee.model, trainee.spec.seed)


def gradient_penalty(trainee: Trainee) -> Gradients:
    """Backward of loss + |gradient of the loss|²: what a regulariser on gradients does."""
    loss = _loss(trainee)
    parameters = [parameter for parameter in trainee.model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    penalty = torch.stack([gradient.square().sum() for gradient in first if gradient is not None]).sum()
    (loss + penalty).backward()
    return _taken(trainee)


def eval_mode(trainee: Trainee) -> Gradients:
    """loss.backward() of the model in eval mode: no dropout, running statistics used and not moved."""
    trainee.model.eval()
    return backward(trainee)


DERIVATIVES: dict[str, Callable[[Trainee], Gradients]] = {
    "backward": backward,
    "autograd.grad": autograd_grad,
    "backward twice": backward_twice,
    "create_graph": create_graph,
    "Hessian-vector product": hessian_vector_product,
    "gradient penalty": gradient_penalty,
    "eval mode": eval_mode,
}


def _loss(trainee: Trainee) -> Tensor:
    trainee.model.zero_grad(set_to_none=True)
    seed_everything(trainee.spec.seed)
    with autocast(trainee):
        return trainee.loss_function(call(trainee.model, trainee.inputs), trainee.targets)


def _taken(trainee: Trainee) -> Gradients:
    """Copies of the gradients; the gradients go, because one with a graph keeps the graph and its parameter alive."""
    gradients = gradients_of(trainee.model)
    trainee.model.zero_grad(set_to_none=True)
    return gradients


def _way(row: LabRow) -> str:
    return row.label.partition(": ")[2]


def _findings(rows: list[LabRow]) -> list[str]:
    findings = []
    for way in dict.fromkeys(map(_way, rows)):
        by_kind = {row.label.partition(": ")[0]: row for row in rows if _way(row) == way}
        wrong = {kind: row for kind, row in by_kind.items() if row.outcome in ("different", "missing")}
        groups = (
            ("bitwise equal for", [kind for kind, row in by_kind.items() if row.outcome == "bitwise equal"]),
            ("equal but for rounding for", [kind for kind, row in by_kind.items() if row.outcome == "rounding"]),
            ("raises for", [kind for kind, row in by_kind.items() if row.outcome == "raised"]),
            ("ends the process for", [kind for kind, row in by_kind.items() if row.outcome == "crashed"]),
            ("silently wrong for", [f"{kind} (by {size_of(row)})" for kind, row in wrong.items()]),
        )
        parts = [f"{words} {', '.join(kinds)}" for words, kinds in groups if kinds]
        if parts:
            findings.append(f"{way.capitalize()}: {'; '.join(parts)}.")
    return findings
