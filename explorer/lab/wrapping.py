"""Wrapped blocks: what wrapping leaves alone, and what one more forward costs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import (
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
    percent,
    step_gradients,
)
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Residual, block_names, blocks_of, chain
from explorer.record.lab import LabChart, LabRow, LabSeries
from explorer.record.policy import KEEP_ALL, Policy

WAYS = {"in_place": "forward replaced in place", "wrapper": "wrapper module", "closure": "closure over forward"}
QUESTIONS = (
    "parameter names kept",
    "saved-weight names kept",
    "blocks of the same class",
    "deep copy runs its own weights",
)


class Wrapper(nn.Module):
    """The block one level deeper, under the name `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def wrap(model: nn.Sequential, way: str) -> None:
    """Makes every block of `model` recompute, in one of the three WAYS."""
    if way == "in_place":
        apply_policy(model, Policy.recompute(block_names(model)))
    elif way == "wrapper":
        for name, block in list(model.named_children()):
            setattr(model, name, Wrapper(block))
    else:
        for block in model.children():
            block.forward = _remembering(block.forward)


def _remembering(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """A function that remembers `forward`; a copy of the block gets the same function, and with it the old block."""

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(forward, x, use_reentrant=False)

    return checkpointed


def wrap_in_place(setting: Setting, bench: Bench) -> Shown:
    """Names, class, copies and gradients of a model wrapped in three ways."""
    x = bench.normal(BATCH, WIDTH)
    plain = chain(Residual, 3).to(bench.device)
    expected = step_gradients(plain, x)
    rows, printed = [baseline_row("not wrapped")], ""
    for done, (way, label) in enumerate(WAYS.items()):
        bench.tell(label, done, len(WAYS))
        model = chain(Residual, 3).to(bench.device)
        wrap(model, way)
        by_position = dict(zip(expected, step_gradients(model, x).values()))
        rows.append(compared_row(label, expected, by_position, *_kept(plain, model, x)))
        if way == setting["printed"]:
            printed = str(model)
    series = [
        LabSeries(name=row.label, y=tuple(_share(row, question) for question in QUESTIONS))
        for row in rows
        if row.figures
    ]
    chart = LabChart(
        kind="bars",
        title="What does each way of wrapping leave as it was?",
        x_title="question",
        y_title="kept",
        unit="%",
        x=QUESTIONS,
        series=tuple(series),
    )
    return Shown(tuple(rows), chart, tuple(_wrap_findings(rows[1:])), printed)


def _kept(plain: nn.Sequential, model: nn.Sequential, x: Tensor) -> tuple[Any, ...]:
    names, saved = dict(plain.named_parameters()), plain.state_dict()
    same_names = sum(name in names for name, _ in model.named_parameters())
    same_saved = sum(name in saved for name in model.state_dict())
    same_class = sum(type(a) is type(b) for a, b in zip(plain, model))
    shares = (
        same_names / len(names),
        same_saved / len(saved),
        same_class / len(plain),
        float(_copy_is_its_own(model, x)),
    )
    return tuple(counted(question, share, "share") for question, share in zip(QUESTIONS, shares))


def _copy_is_its_own(model: nn.Sequential, x: Tensor) -> bool:
    """A copy whose weights are all zero returns its input (every block is x + ...), if it runs its own weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        return torch.equal(twin(x), x)


def _share(row: LabRow, question: str) -> float | None:
    value = row.value(question)
    return None if value is None else 100.0 * float(value)


def _wrap_findings(rows: list[LabRow]) -> list[str]:
    said = []
    for row in rows:
        lost = [question for question in QUESTIONS if row.value(question) != 1.0]
        loses = f"fails at: {', '.join(lost)}" if lost else "leaves everything as it was"
        said.append(f"{row.label.capitalize()}: gradients {row.outcome}; {loses}.")
    return said


PARTS: tuple[Literal["forward", "recompute", "backward"], ...] = ("forward", "recompute", "backward")


def extra_forward(setting: Setting, bench: Bench) -> Shown:
    """FLOPs of forward, recompute and backward, plain and under the chosen policy."""
    inner = [f"half{h}.block{i}" for h in range(2) for i in range(4)]
    blocks = {"all": inner, "second": inner[1::2], "nested": ["half0", "half1", *inner]}[setting["blocks"]]
    policy = Policy.recompute(blocks, early_stop=setting["early_stop"] == "on")
    bench.tell("counting the plain step", 0, 2)
    plain, expected = _count(KEEP_ALL, bench)
    bench.tell("counting the recomputed step", 1, 2)
    total, found = _count(policy, bench)
    # The same backward in both runs: whatever the second one computes beyond the first is recompute.
    flops = {"keep": (plain[0], 0, plain[1]), "recompute": (total[0], total[1] - plain[1], plain[1])}
    figures = {k: tuple(counted(part, n, "FLOPs") for part, n in zip(PARTS, parts)) for k, parts in flops.items()}
    rows = (
        baseline_row("keep", *figures["keep"]),
        compared_row("recompute", expected, found, *figures["recompute"]),
    )
    chart = LabChart(
        kind="stacked bars",
        title="Where does the arithmetic of a step go?",
        x_title="policy",
        y_title="operations",
        unit="FLOPs",
        x=tuple(flops),
        series=tuple(
            LabSeries(name=p, part=p, y=tuple(float(f[i]) for f in flops.values())) for i, p in enumerate(PARTS)
        ),
    )
    forward, again, backward = flops["recompute"]
    findings = (
        f"The recompute costs {percent(again / forward)} of one forward: {again:,} of {forward:,} FLOPs.",
        f"That makes the whole step {percent(again / (forward + backward))} more expensive, and gradients are "
        f"{rows[1].outcome}.",
        _why(again / forward, setting),
    )
    return Shown(rows, chart, findings)


def _why(share: float, setting: Setting) -> str:
    if setting["early_stop"] == "on" and share < 1:
        return (
            "Each block has two matrix products of equal size, and backward needs the result of the first one only: "
            "the rerun stops before the second."
        )
    if share > 1:
        return "More than one forward: a block inside a recomputed block runs again for each of them."
    return f"Without early stop every recomputed block runs in full: {percent(share)} of the forward runs twice."


def _count(policy: Policy, bench: Bench) -> tuple[tuple[int, int], Gradients]:
    """FLOPs of forward and of backward (recompute included), and the gradients."""
    model = nn.Sequential(OrderedDict((f"half{h}", chain(Residual, 4, seed=h)) for h in range(2))).to(bench.device)
    x = bench.normal(BATCH, WIDTH)
    with apply_policy(model, policy):
        with FlopCounterMode(display=False) as forward:
            loss = mean_square(model(x))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return (int(forward.get_total_flops()), int(backward.get_total_flops())), gradients_of(model)


ENGINES: dict[str, dict[str, bool]] = {
    "keep": {},
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


def engine_policy(engine: str, blocks: list[str]) -> Policy:
    """KEEP_ALL for `keep`, else all of `blocks` under one of torch's two checkpoints."""
    return Policy.recompute(blocks, **ENGINES[engine]) if ENGINES[engine] else KEEP_ALL


def pullback_twice(setting: Setting, bench: Bench) -> Shown:
    """Two backward calls through one forward, for each way of checkpointing."""
    p = 0.3 if setting["dropout"] == "yes" else 0.0
    rows: list[LabRow] = []
    expected: Gradients = {}
    runs: dict[str, list[float | None]] = {}
    for done, engine in enumerate(ENGINES):
        bench.tell(engine, done, len(ENGINES))
        model = chain(partial(Dropped, p), 3).to(bench.device)
        calls = [0]
        blocks_of(model, Dropped)[0].linear.register_forward_hook(partial(_count_call, calls))
        with apply_policy(model, engine_policy(engine, block_names(model))):
            torch.manual_seed(0)
            loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
            runs[engine] = [1.0]
            for call in ("first", "second"):
                found = attempt(partial(_pull, model, loss, retain=setting["retain_graph"] == "yes"))
                if not expected and not isinstance(found, Raised):
                    expected = found
                rows.append(
                    compared_row(f"{engine}, {call} call", expected, found, counted("forwards of block0", calls[0]))
                )
                runs[engine].append(None if isinstance(found, Raised) else float(calls[0]))
    rows[0] = LabRow(label=rows[0].label, outcome="baseline", figures=rows[0].figures)
    chart = LabChart(
        kind="bars",
        title="How often has block0 run its forward so far?",
        x_title="after",
        y_title="forwards of block0",
        x=("forward", "first backward", "second backward"),
        series=tuple(LabSeries(name=engine, y=tuple(values)) for engine, values in runs.items()),
    )
    return Shown(tuple(rows), chart, tuple(_pullback_findings(rows)))


def _count_call(calls: list[int], *hook_arguments: Any) -> None:
    calls[0] += 1


def _pull(model: nn.Module, loss: Tensor, *, retain: bool) -> Gradients:
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=retain)
    return gradients_of(model)


def _pullback_findings(rows: list[LabRow]) -> list[str]:
    said = []
    for engine, (_, second) in zip(ENGINES, zip(rows[::2], rows[1::2])):
        if second.outcome == "raised":
            said.append(f"{engine.capitalize()}: the second call raised, for the first one let go of the graph.")
        else:
            said.append(
                f"{engine.capitalize()}: the second call is {second.outcome}; block0 ran "
                f"{second.value('forwards of block0')} times in all."
            )
    return said
