"""Wrapped blocks that remember something: running statistics, counters, the mode."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.recompute import is_recomputing
from explorer.lab.kit.apart import rows_apart
from explorer.lab.kit.bench import (
    DISTANCE,
    Bench,
    Gradients,
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
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, block_names, blocks_of, chain
from explorer.record.lab import LabChart, LabRow, LabSeries
from explorer.record.policy import KEEP_ALL, Policy

LEARNING_RATE = 0.05
CURES = {"both forwards count": "every_forward", "momentum trick": "every_forward", "second forward discarded": "once"}
"""What is done about the second update, and the explorer's own option behind it."""


def batchnorm(setting: Setting, bench: Bench) -> Shown:
    """Running statistics after some steps of training, without and with each cure."""
    n_steps, momentum = int(setting["steps"]), float(setting["momentum"])
    plain = _train(KEEP_ALL, momentum, n_steps, bench)
    rows, series = [baseline_row("kept", counted("batches counted", _counter(plain[-1])))], []
    for done, (cure, option) in enumerate(CURES.items()):
        bench.tell(cure, done, len(CURES))
        names = [f"block{i}" for i in range(4 if setting["blocks"] == "all" else 2)]
        policy = Policy.recompute(names, running_stats=option)
        used = 1 - math.sqrt(1 - momentum) if cure == "momentum trick" else momentum
        trained = _train(policy, used, n_steps, bench)
        gaps = [gap(a.statistics, b.statistics) for a, b in zip(plain, trained)]
        rows.append(_statistics_row(cure, plain, trained))
        series.append(LabSeries(name=cure, y=tuple(g.distance for g in gaps)))
    chart = LabChart(
        kind="lines",
        title="How far are the running statistics from those of the kept run?",
        x_title="training step",
        y_title=DISTANCE,
        x=tuple(str(i + 1) for i in range(n_steps)),
        series=tuple(series),
    )
    return Shown(tuple(rows), chart, tuple(_batchnorm_findings(rows, setting)))


class Snapshot:
    """The net after one training step: copies on the CPU."""

    def __init__(self, model: nn.Module, probe: Tensor) -> None:
        self.gradients = gradients_of(model)
        buffers = {name: b.detach().cpu().clone() for name, b in model.named_buffers()}
        self.statistics: Gradients = {n: b for n, b in buffers.items() if b.is_floating_point()}
        self.counters = {n: int(b) for n, b in buffers.items() if not b.is_floating_point()}
        model.eval()
        with torch.no_grad():
            self.eval_output: Gradients = {"output": model(probe).cpu()}
        model.train()


def _train(policy: Policy, momentum: float, n_steps: int, bench: Bench) -> list[Snapshot]:
    model = chain(partial(Normed, momentum), 4).to(bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    probe, seen = bench.normal(BATCH, WIDTH, seed=99), []
    with apply_policy(model, policy):
        for step in range(n_steps):
            x = 1.0 + 2.0 * bench.normal(BATCH, WIDTH, seed=step)
            step_gradients(model, x)
            optimizer.step()
            seen.append(Snapshot(model, probe))
    return seen


def _counter(snapshot: Snapshot) -> int:
    return max(snapshot.counters.values())


def _statistics_row(label: str, plain: list[Snapshot], trained: list[Snapshot]) -> LabRow:
    last, expected = trained[-1], plain[-1]
    moved = gap(expected.statistics, last.statistics)
    equal = moved.outcome == "bitwise equal" and last.counters == expected.counters
    return LabRow(
        label=label,
        outcome="bitwise equal" if equal else "different",
        figures=(
            measured("running statistics off by", moved.distance),
            measured("eval output off by", gap(expected.eval_output, last.eval_output).distance),
            counted("batches counted", _counter(last)),
            measured(
                "gradients of every step",
                all(
                    a.gradients.keys() == b.gradients.keys()
                    and gap(a.gradients, b.gradients).outcome == "bitwise equal"
                    for a, b in zip(plain, trained)
                ),
            ),
        ),
        note="" if last.counters == expected.counters else "counters differ as well",
    )


def _batchnorm_findings(rows: list[LabRow], setting: Setting) -> list[str]:
    twice, trick, once = rows[1:]
    off = [size_of(row, "running statistics off by") for row in (twice, trick, once)]
    n_right, n_twice = rows[0].value("batches counted"), twice.value("batches counted")
    gradients = [row.value("gradients of every step") for row in (twice, trick, once)]
    return [
        f"Left alone, the second forward counts too: {n_twice} batches instead of {n_right}, statistics off by "
        f"{off[0]} of their size, and the model's output in eval mode off by "
        f"{brief(float(twice.value('eval output off by') or 0.0))}.",
        f"Gradients of all steps are {'bitwise equal' if all(gradients) else 'not all equal'}: training alone would "
        f"{'never' if all(gradients) else 'sometimes'} show it.",
        f"The momentum trick ends at {off[1]}, {'nearly right' if float(off[1]) < 1e-4 else 'not right'}"
        + (
            ": it slows down every BatchNorm, also those that are not recomputed."
            if setting["blocks"] == "half"
            else f", and its counter still says {trick.value('batches counted')}."
        ),
        f"Discarding what the second forward writes ends at {off[2]}: {once.outcome}, counter included.",
    ]


class Warming(nn.Module):
    """Scales down with every forward it counts."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.n_forwards = 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.asks and is_recomputing()):
            self.n_forwards += 1
        return torch.tanh(self.linear(x / (1.0 + self.n_forwards)))


def asking_layer(setting: Setting, bench: Bench) -> Shown:
    """A counting layer under recompute: its counter and the gradient of each step."""
    n_steps = int(setting["steps"])
    make = partial(Warming, asks=setting["asks"] == "yes")
    found: dict[str, tuple[list[Gradients], list[int]]] = {}
    for done, label in enumerate(("kept", "recomputed")):
        bench.tell(label, done, 2)
        model = chain(make, 3).to(bench.device)
        gradients, counts = [], []
        with apply_policy(model, KEEP_ALL if label == "kept" else Policy.recompute(block_names(model))):
            for step in range(n_steps):
                gradients.append(step_gradients(model, bench.normal(BATCH, WIDTH, seed=step)))
                counts.append(blocks_of(model, Warming)[0].n_forwards)
        found[label] = (gradients, counts)
    (expected, right), (given, counts) = found["kept"], found["recomputed"]
    rows = (
        baseline_row("kept", counted("forwards counted", right[-1])),
        compared_row("recomputed, first step", expected[0], given[0], counted("forwards counted", counts[0])),
        compared_row("recomputed, last step", expected[-1], given[-1], counted("forwards counted", counts[-1])),
    )
    chart = LabChart(
        kind="lines",
        title="How many forwards did the layer count?",
        x_title="training step",
        y_title="forwards counted",
        x=tuple(str(i + 1) for i in range(n_steps)),
        series=(
            LabSeries(name="kept", y=tuple(map(float, right)), part="baseline"),
            LabSeries(name="recomputed", y=tuple(map(float, counts)), part="candidate"),
        ),
    )
    return Shown(rows, chart, tuple(_asking_findings(rows)))


def _asking_findings(rows: tuple[LabRow, ...]) -> list[str]:
    kept, first, last = rows
    n_right, n_counted = kept.value("forwards counted"), last.value("forwards counted")
    said = [f"Kept, the layer counts {n_right} forwards; recomputed, {n_counted}."]
    if first.outcome == "bitwise equal":
        said.append("Gradients are bitwise equal: the rerun saw the very value that the first forward used.")
    else:
        said.append(
            f"The rerun scales by another value than forward did: the first gradient is off by "
            f"{size_of(first)} of its size, and nothing complains."
        )
    return said


CHECK_OFF = "non-reentrant, check off"
FLIPPED: dict[str, dict[str, Any]] = {
    "non-reentrant": {},
    CHECK_OFF: {"determinism_check": "none"},
    "reentrant": {"use_reentrant": True},
}


def mode_flip(setting: Setting, bench: Bench) -> Shown:
    """The same step with eval() called between forward and backward."""
    rows = [baseline_row("kept")]
    for label in FLIPPED:
        arguments = (label, setting["layer"], setting["flip"])
        # Nobody compares shapes there, and a kernel that is handed empty tensors may end the process.
        rows += rows_apart([(flip_row, arguments)], bench) if label == CHECK_OFF else [flip_row(bench, *arguments)]
    chart = LabChart(
        kind="bars",
        title="How wrong is the gradient?",
        x_title="checkpoint",
        y_title=DISTANCE,
        x=tuple(row.label for row in rows[1:]),
        series=(LabSeries(name=DISTANCE, y=tuple(number(row, DISTANCE) for row in rows[1:]), part="candidate"),),
    )
    return Shown(tuple(rows), chart, tuple(map(_flip_finding, rows[1:])))


def flip_row(bench: Bench, label: str, layer: str, flip: str) -> LabRow:
    """One checkpoint of FLIPPED against the kept step, on blocks with `layer`; `flip` is `between` or `never`."""
    make = partial(Dropped, 0.3) if layer == "dropout" else Normed
    kept, model = (chain(make, 3).to(bench.device) for _ in range(2))
    flips = flip == "between"
    expected = _flipped_step(kept, KEEP_ALL, bench, flips=flips)
    policy = Policy.recompute(block_names(model), **FLIPPED[label])
    return compared_row(label, expected, attempt(partial(_flipped_step, model, policy, bench, flips=flips)))


def _flipped_step(model: nn.Module, policy: Policy, bench: Bench, *, flips: bool) -> Gradients:
    with apply_policy(model, policy):
        torch.manual_seed(0)
        loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
        if flips:
            model.eval()
        loss.backward()
    return gradients_of(model)


def _flip_finding(row: LabRow) -> str:
    name = row.label.capitalize()
    if row.outcome == "raised":
        return f"{name} refuses: {row.note}."
    if row.outcome == "crashed":
        return f"{name}: {row.note}, without an exception that anybody could catch."
    if row.outcome == "bitwise equal":
        return f"{name}: gradients are bitwise equal."
    return f"{name} says nothing and is off by {size_of(row)} of the gradient's size."
