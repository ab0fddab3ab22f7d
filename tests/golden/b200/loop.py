"""The loop and the optimizer that ran on the B200, written from their description, and its rows as runs without data.

Three steps: forward alone with its graph kept, forward and backward, and both with an AdamW that works out of place.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.bench.step import OnPhase, Trainee, autocast, step_with_optimizer, step_without_loss
from explorer.plan.card.cards import CARDS
from explorer.record import Measurement, ModelRef, RunSpec

HERE = Path(__file__).parent
LANGUAGE_MODEL = HERE.parents[2] / "benchmarks" / "_b200_language_model.py"
B200 = replace(CARDS["b200"], torch="2.11")
"""The card and the torch of the rows."""
ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in json.loads((HERE / "rows.json").read_text())["rows"]}


class AdamW(torch.optim.Optimizer):
    """One parameter after the other, each new moment in new memory. Nothing is fused."""

    def __init__(self, parameters: Any, lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.999), "eps": 1e-8})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad.data, self.state[p]
                p.data -= (lr * group["decay"]) * p.data
                first = state.get("first", torch.zeros_like(g))
                second = state.get("second", torch.zeros_like(g))
                n = state.get("n", 1)
                new_first = beta1 * first + (1 - beta1) * g
                new_second = beta2 * second + (1 - beta2) * g**2
                size = lr * math.sqrt(1 - beta2**n) / (1 - beta1**n)
                p.data -= size * new_first / (torch.sqrt(new_second) + group["eps"])
                state["first"], state["second"], state["n"] = new_first, new_second, n + 1


def forward_alone(trainee: Trainee, on_phase: OnPhase) -> None:
    """Forward without a loss. The graph lives until the step is over."""
    on_phase("forward")
    with autocast(trainee):
        logits = trainee.model(trainee.inputs)
    del logits


STEPS = {
    "forward": forward_alone,
    "forward+loss+backward": step_without_loss,
    "forward+loss+backward+AdamW": step_with_optimizer(f"{HERE / 'loop.py'}:AdamW"),
}


def spec_of(row: dict[str, Any]) -> RunSpec:
    """The row's step on a B200. Two GPUs sum gradients in place: each holds what one alone would."""
    arguments = {"size": row["size"], "seq": row["seq"], "segments": row["segments"] or 0, "rows": row.get("rows", 4)}
    arguments |= {"reached": row["reached"]} if "reached" in row else {}
    return RunSpec(
        model=ModelRef(target=f"{LANGUAGE_MODEL}:build", arguments=arguments),
        optimizer="none",
        autocast="bfloat16" if row["precision"] == "bf16" else "none",
        card=replace(B200, n_steps=row.get("step", B200.n_steps)),
    )


def simulated(row: dict[str, Any]) -> Measurement:
    """The row's step without data."""
    return measure_without_data(spec_of(row), step=STEPS[row["scope"]])
