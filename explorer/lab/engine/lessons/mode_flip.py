"""eval() between forward and backward.

A training loop may switch to eval mode to log something before it calls backward. For an ordinary model that is
harmless: forward is over. A recomputed block has its second forward still to come, and that one now runs in eval
mode: no dropout, other statistics.

torch can compare shapes and number of the recomputed tensors with those of the first forward (determinism_check) and
refuse. Whether that notices anything depends on what changed.
"""

from __future__ import annotations

from functools import partial

import torch

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Setting,
    attempt,
    gradients_of,
    mean_square,
    row_of_process,
)
from explorer.lab.engine.kit.nets import BATCH, CHECK_OFF, CHECKPOINTS, WIDTH, Dropped, Normed, chain
from explorer.lab.engine.kit.rows import baseline_row, compared_row, distance_bars, outcome_sentence
from explorer.lab.record import LabRow
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Wrapped blocks", 8
QUESTION = "What if the model's mode changes before the block runs again?"
SWITCHES = {
    "layer": ("Which layer minds the mode?", {"dropout": "Dropout", "batchnorm": "BatchNorm"}),
    "flip": ("When is eval() called?", {"between": "Between forward and backward", "never": "Not at all"}),
}
WORDS = ("non-reentrant", "reentrant", "recompute", "cosine", "relative distance")


def run(setting: Setting, bench: LabBench) -> Answer:
    """The same step with eval() called between forward and backward."""
    rows = [baseline_row("kept")]
    for label in CHECKPOINTS:
        arguments = (label, setting["layer"], setting["flip"])
        # Shapes are not compared there, and a kernel that is handed empty tensors may end the process.
        apart = label == CHECK_OFF
        rows.append(row_of_process(flip_row, bench, *arguments) if apart else flip_row(bench, *arguments))
    chart = distance_bars(rows[1:], "How wrong is the gradient?")
    return Answer(tuple(rows), chart, tuple(map(outcome_sentence, rows[1:])))


def flip_row(bench: LabBench, label: str, layer: str, flip: str) -> LabRow:
    """A row that compares one of CHECKPOINTS with keeping, on blocks with `layer`; `flip`: `between` or `never`."""
    make = partial(Dropped, 0.3) if layer == "dropout" else Normed

    def step(policy: Policy) -> Gradients:
        model = chain(make, 3).to(bench.device)
        with apply_policy(model, policy):
            torch.manual_seed(0)
            loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
            if flip == "between":
                model.eval()
            loss.backward()
        return gradients_of(model)

    policy = Policy.recompute([f"block{i}" for i in range(3)], **CHECKPOINTS[label])
    return compared_row(label, step(KEEP_ALL), attempt(lambda: step(policy)))
