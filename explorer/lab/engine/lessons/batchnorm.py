"""BatchNorm counts every batch twice.

In training, BatchNorm normalises with the batch at hand and also keeps a moving average for later, when the model is
used. A recomputed block runs its forward twice a step, so the average moves twice. The loss and the gradients of this
step do not notice: they use the batch's own numbers.

Two cures are compared. The momentum trick makes each update smaller, so that two small ones reach about as far as
one. The explorer's cure lets the second forward write into copies that are thrown away.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, gradients_of, step_gradients
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Normed, chain
from explorer.lab.engine.kit.rows import DISTANCE, baseline_row, chart, counted, gap, line, measured, size_of
from explorer.lab.record import LabRow
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Wrapped blocks", 6
QUESTION = "What does a second forward do to running statistics, and which cure is exact?"
SWITCHES = {
    "steps": ("How many training steps?", {"10": "10", "1": "1", "40": "40"}),
    "blocks": ("Which blocks are recomputed?", {"all": "All four", "half": "The first two of four"}),
    "momentum": ("How fast does the average move?", {"0.1": "momentum 0.1 (the default)", "0.5": "momentum 0.5"}),
}
WORDS = ("running statistics", "recompute", "bitwise equal", "relative distance")

LEARNING_RATE = 0.05
CURES = {"both forwards count": "every_forward", "momentum trick": "every_forward", "second forward discarded": "once"}
"""What is done about the second update, and the explorer's own option behind it."""


def run(setting: Setting, bench: LabBench) -> Answer:
    """Running statistics after some steps of training, without and with each cure."""
    n_steps, momentum = int(setting["steps"]), float(setting["momentum"])
    plain = _train(KEEP_ALL, momentum, n_steps, bench)
    rows, series = [baseline_row("kept", counted("batches counted", plain[-1].n_counted))], []
    for done, (cure, option) in enumerate(CURES.items()):
        bench.tell(cure, done, len(CURES))
        names = [f"block{i}" for i in range(4 if setting["blocks"] == "all" else 2)]
        policy = Policy.recompute(names, running_stats=option)
        used = 1 - math.sqrt(1 - momentum) if cure == "momentum trick" else momentum
        trained = _train(policy, used, n_steps, bench)
        gaps = [gap(a.statistics, b.statistics) for a, b in zip(plain, trained)]
        rows.append(_statistics_row(cure, plain, trained))
        series.append(line(cure, [distance.distance for distance in gaps]))
    titles = ("How far are the running statistics from those of the kept run?", "training step", DISTANCE)
    drawn = chart("lines", titles, [str(i + 1) for i in range(n_steps)], series)
    return Answer(tuple(rows), drawn, tuple(_findings(rows)))


class TrainedNet:
    """The net after one training step: copies on the CPU."""

    def __init__(self, model: nn.Module, probe: Tensor) -> None:
        self.gradients = gradients_of(model)
        self.buffers: Gradients = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
        self.statistics = {name: buffer for name, buffer in self.buffers.items() if "running" in name}
        self.n_counted = max(int(buffer) for buffer in model.buffers() if not buffer.dim())
        model.eval()
        with torch.no_grad():
            self.eval_output: Gradients = {"output": model(probe).cpu()}
        model.train()


def _train(policy: Policy, momentum: float, n_steps: int, bench: LabBench) -> list[TrainedNet]:
    model = chain(partial(Normed, momentum), 4).to(bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    probe, trained = bench.normal(BATCH, WIDTH, seed=99), []
    with apply_policy(model, policy):
        for step in range(n_steps):
            x = 1.0 + 2.0 * bench.normal(BATCH, WIDTH, seed=step)
            step_gradients(model, x)
            optimizer.step()
            trained.append(TrainedNet(model, probe))
    return trained


def _statistics_row(label: str, plain: list[TrainedNet], trained: list[TrainedNet]) -> LabRow:
    last, expected = trained[-1], plain[-1]
    return LabRow(
        label=label,
        outcome=gap(expected.buffers, last.buffers).outcome,
        figures=(
            measured("running statistics off by", gap(expected.statistics, last.statistics).distance),
            measured("eval output off by", gap(expected.eval_output, last.eval_output).distance),
            counted("batches counted", last.n_counted),
            measured(
                "gradients of every step",
                all(gap(a.gradients, b.gradients).outcome == "bitwise equal" for a, b in zip(plain, trained)),
            ),
        ),
        note="" if last.n_counted == expected.n_counted else "counters differ as well",
    )


def _findings(rows: list[LabRow]) -> list[str]:
    twice, trick, once = rows[1:]
    off = [size_of(row, "running statistics off by") for row in (twice, trick, once)]
    equal = all(row.value("gradients of every step") for row in rows[1:])
    return [
        f"Left alone, the second forward counts too: {twice.value('batches counted')} batches instead of "
        f"{rows[0].value('batches counted')}. Statistics are off by {off[0]} of their size, the model's output in eval "
        f"mode by {size_of(twice, 'eval output off by')}.",
        f"Gradients of all steps are {'bitwise equal: training alone never shows it' if equal else 'not all equal'}.",
        f"The momentum trick ends at {off[1]}, and its counter says {trick.value('batches counted')}. It slows down "
        "every BatchNorm, also those that are not recomputed.",
        f"Discarding what the second forward writes ends at {off[2]}: {once.outcome}, counter included.",
    ]
