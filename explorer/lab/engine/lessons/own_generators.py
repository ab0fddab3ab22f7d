"""Random numbers from somewhere else.

torch's snapshot covers torch's own default generators. A block may draw from others: a torch.Generator that it owns,
Python's random module, numpy. Nothing resets them, and nothing reports it.

A policy of this explorer can name them in restore_rng; then they are put back before the block runs again and
afterwards moved on to where they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.rng import seed_everything
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, step_gradients
from explorer.lab.engine.kit.nets import BATCH, CHECKPOINTS, WIDTH, Dropped, block_names, chain, torch_mask
from explorer.lab.engine.kit.rows import N_BLOCKS, mask_chart, mask_rows, mismatches, percent, sides, size_of
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Wrapped blocks", 3
QUESTION = "Which random generators does a checkpoint put back?"
SWITCHES = {
    "source": (
        "Where does the block draw its mask from?",
        {
            "generator": "A torch.Generator of its own",
            "python": "Python's random",
            "numpy": "numpy",
            "torch": "torch's default generator",
        },
    ),
    "restore": ("Is it named in restore_rng?", {"no": "No", "yes": "Yes"}),
}
WORDS = ("RNG", "snapshot", "mask", "relative distance", "non-reentrant", "reentrant")

P_DROP = 0.3


class _OwnDropped(Dropped):
    """Draws its mask from a generator of its own."""

    def __init__(self, p: float) -> None:
        super().__init__(p, self.own_mask)
        self.generator = torch.Generator().manual_seed(5)

    def own_mask(self, x: Tensor, p: float) -> Tensor:
        return (torch.rand(x.shape, generator=self.generator) >= p).to(x)


def _python_mask(x: Tensor, p: float) -> Tensor:
    return torch.tensor([random.random() >= p for _ in range(x.numel())]).view(x.shape).to(x)


def _numpy_mask(x: Tensor, p: float) -> Tensor:
    return torch.from_numpy(np.random.random(x.shape) >= p).to(x)


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "generator": partial(_OwnDropped, P_DROP),
    "python": partial(Dropped, P_DROP, _python_mask),
    "numpy": partial(Dropped, P_DROP, _numpy_mask),
    "torch": partial(Dropped, P_DROP, torch_mask),
}


def run(setting: Setting, bench: LabBench) -> Answer:
    """A mask from a generator that torch does not stash, without and with the explorer putting it back."""
    source = setting["source"]
    named = {
        "generator": tuple(f"block{i}.generator" for i in range(N_BLOCKS)),
        "python": ("python",),
        "numpy": ("numpy",),
        "torch": (),
    }[source]
    restore = named if setting["restore"] == "yes" else ()
    expected = _seeded_gradients(_fresh(source, bench), KEEP_ALL, bench)
    models = {label: _fresh(source, bench) for label in ("reentrant", "non-reentrant")}
    runs = {}
    for label, model in models.items():
        policy = Policy.recompute(block_names(model), restore_rng=restore, **CHECKPOINTS[label])
        runs[label] = partial(_seeded_gradients, model, policy, bench)
    rows = sides(bench, ("kept", expected), runs)
    shares = mismatches(models["non-reentrant"])
    wrong = [row.label for row in rows[1:] if row.outcome != "bitwise equal"]
    findings = (
        f"Wrong gradients and no word about it: {' and '.join(wrong)}."
        if wrong
        else "Both checkpoints are bitwise equal.",
        f"The rerun's masks differ in {percent(sum(shares) / N_BLOCKS)} of their elements, the gradient is off by "
        f"{size_of(rows[2])} of its size.",
        f"Put back before each rerun: torch's default generators{', ' + ', '.join(restore) if restore else ''}.",
    )
    return Answer((*rows, *mask_rows(shares)), mask_chart(shares, P_DROP), findings)


def _fresh(source: str, bench: LabBench) -> nn.Sequential:
    return chain(SOURCES[source], N_BLOCKS).to(bench.device)


def _seeded_gradients(model: nn.Module, policy: Policy, bench: LabBench) -> Gradients:
    seed_everything(0)
    with apply_policy(model, policy):
        return step_gradients(model, bench.normal(BATCH, WIDTH).requires_grad_())
