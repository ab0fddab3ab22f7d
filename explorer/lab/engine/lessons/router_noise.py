"""A router that changes its mind.

A mixture of experts sends each token to the expert with the best score, and noise on the scores keeps all experts
busy. Without a snapshot the rerun draws other noise, and some tokens go to another expert than they did in forward.

Now even shapes change: an expert may see seven tokens first and nine the second time. The non-reentrant checkpoint
compares shapes and can refuse; the reentrant one compares nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting, attempt, step_gradients
from explorer.lab.engine.kit.nets import BATCH, CHECKPOINTS, WIDTH, block_names, blocks_of, chain
from explorer.lab.engine.kit.rows import (
    baseline_row,
    compared_row,
    distance_bars,
    measured,
    number,
    outcome_sentence,
    percent,
)
from explorer.lab.record import LabRow
from explorer.record.policy import Policy

THEME, PLACE = "Traps", 5
QUESTION = "What if the rerun sends tokens to other experts?"
SWITCHES = {
    "preserve_rng_state": ("Is the random state put back?", {"off": "No", "on": "Yes (torch's default)"}),
    "noise": ("How strong is the noise?", {"strong": "Strong", "weak": "Weak: a few tokens change their expert"}),
}
WORDS = ("expert", "RNG", "snapshot", "non-reentrant", "reentrant", "relative distance")

MOVED = "tokens sent to another expert"


class Router(nn.Module):
    """Two experts and a noisy router: each token goes to the expert with the higher noisy score."""

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.noise = noise
        self.choices: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        chosen = (scores + self.noise * torch.randn_like(scores)).argmax(dim=-1)
        self.choices.append(chosen.cpu())
        gate = scores.softmax(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * gate[rows, index, None])
        return x + out


def run(setting: Setting, bench: LabBench) -> Answer:
    """A noisy mixture of experts under each checkpoint: tokens that changed their expert, and the gradient."""
    make = partial(Router, 1.0 if setting["noise"] == "strong" else 0.05)
    preserve = setting["preserve_rng_state"] == "on"
    x = bench.normal(4 * BATCH, WIDTH)
    expected = step_gradients(chain(make, 2).to(bench.device), x.clone().requires_grad_())
    rows = [baseline_row("kept")]
    for done, (label, options) in enumerate(CHECKPOINTS.items()):
        bench.tell(label, done, len(CHECKPOINTS))
        model = chain(make, 2).to(bench.device)
        with apply_policy(model, Policy.recompute(block_names(model), preserve_rng_state=preserve, **options)):
            tried = attempt(partial(step_gradients, model, x.clone().requires_grad_()))
        rows.append(compared_row(label, expected, tried, measured(MOVED, _moved(model), "share")))
    return Answer(tuple(rows), distance_bars(rows[1:], "How wrong is the gradient?"), tuple(_findings(rows[1:])))


def _moved(model: nn.Sequential) -> float | None:
    """Largest share of tokens that a rerun routed elsewhere; None: no block ran again."""
    again = [block.choices for block in blocks_of(model, Router) if len(block.choices) > 1]
    return max((float((first != second).double().mean()) for first, second, *_ in again), default=None)


def _findings(rows: list[LabRow]) -> list[str]:
    findings = []
    for row in rows:
        moved = number(row, MOVED)
        share = "no block ran again" if moved is None else f"{percent(moved)} of a block's tokens changed their expert"
        findings.append(outcome_sentence(row, share))
    return findings
