"""Equal gradients and another optimizer: what a parameter moved is judged, not where it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import explorer
from explorer.own_loop.judge import Judged
from tests.own_loop.program_nets import squares

Make = Callable[[Any], torch.optim.Optimizer]


def step_with(make: Make) -> Callable[[nn.Module, Any], Tensor]:
    """One optimizer for all steps of a run, made at the first."""
    made: dict[int, torch.optim.Optimizer] = {}

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = squares(model, batch)
        made.setdefault(id(model), make(model.parameters())).step()
        return loss

    return step


def judged(reference: Make, candidate: Make) -> Judged:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    batch = torch.randn(32, 16), torch.randn(32, 5)
    return explorer.judge(step_with(reference), step_with(candidate), model, batch, copy.deepcopy(model))


def of(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, **options)


LR, DECAY, OTHER = "another learning rate or momentum", "another weight decay", "the optimizers do something else"
BUGS = {
    "decay forgotten": (of(SGD, lr=1e-2, weight_decay=1e-4), of(SGD, lr=1e-2), DECAY),
    "lr of 1e-3": (of(SGD, lr=1e-3), of(SGD, lr=1.01e-3), LR),
    "lr of 1e-4": (of(SGD, lr=1e-4), of(SGD, lr=1.1e-4), LR),
    "lr of 1e-5": (of(SGD, lr=1e-5), of(SGD, lr=2e-5), OTHER),
    "decay of AdamW forgotten": (of(AdamW, lr=1e-3, weight_decay=1e-3), of(AdamW, lr=1e-3, weight_decay=0), DECAY),
    "small lr, decay forgotten": (of(AdamW, lr=1e-4), of(AdamW, lr=1e-4, weight_decay=0), DECAY),
    "coupled decay": (of(AdamW, lr=1e-3, weight_decay=1e-3), of(Adam, lr=1e-3, weight_decay=1e-3), OTHER),
    "momentum": (of(SGD, lr=1e-3, momentum=0.9), of(SGD, lr=1e-3, momentum=0.89), LR),
    "nesterov": (of(SGD, lr=1e-5, momentum=0.9), of(SGD, lr=1e-5, momentum=0.9, nesterov=True), OTHER),
    "second beta": (of(AdamW, lr=1e-4), of(AdamW, lr=1e-4, betas=(0.9, 0.98)), OTHER),
    "first beta": (of(AdamW, lr=1e-4), of(AdamW, lr=1e-4, betas=(0.91, 0.999)), OTHER),
    "epsilon": (of(AdamW, lr=1e-3), of(AdamW, lr=1e-3, eps=1e-7), OTHER),
    "a learning rate of zero": (of(SGD, lr=1e-2), of(SGD, lr=0.0), "the candidate does not move it"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_another_optimizer_is_different_and_what_it_does_is_said(bug: str) -> None:
    reference, candidate, says = BUGS[bug]
    verdict = judged(reference, candidate)
    assert verdict.verdict == "different", verdict
    assert verdict.causes[0].startswith("The gradients are the same and the step of ") and says in verdict.causes[0]
    assert "of its last step away" in str(verdict)


class AdamWInFloat32(torch.optim.Optimizer):
    """Written by hand, its corrections in float32: 1 - 0.999 ** n is right to three digits fewer."""

    def __init__(self, parameters: Any, lr: float, decay: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                if not own:
                    own |= {"n": torch.zeros(()), "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                own["n"] += 1
                own["mean"].lerp_(p.grad, 0.1)
                own["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                first, second = (1 - torch.tensor(beta) ** own["n"] for beta in (0.9, 0.999))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * (own["mean"] / first) / ((own["square"] / second).sqrt() + 1e-8))


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (of(AdamW, lr=1e-2), of(AdamW, lr=1e-2, fused=True)),
        (of(AdamW, lr=1e-2), of(AdamWInFloat32, lr=1e-2)),
        (of(AdamW, lr=1e-4), of(AdamWInFloat32, lr=1e-4)),
        (of(SGD, lr=0.1, momentum=0.9), of(SGD, lr=0.1, momentum=0.9, fused=True)),
        (of(SGD, lr=1e-2), of(SGD, lr=1e-2 * (1 + 1e-6))),
    ],
)
def test_the_same_step_in_other_arithmetic_is_rounding(reference: Make, candidate: Make) -> None:
    judged(reference, candidate).require()
