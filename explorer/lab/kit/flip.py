"""One step whose model changes to eval mode before its blocks run again, under any of torch's checkpoints."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import Gradients, LabBench, attempt, gradients_of, mean_square
from explorer.lab.kit.engines import CHECKPOINTS
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, block_names, chain
from explorer.lab.kit.rows import compared_row
from explorer.record.lab import LabRow
from explorer.record.policy import KEEP_ALL, Policy


def flip_row(bench: LabBench, label: str, layer: str, flip: str) -> LabRow:
    """One of CHECKPOINTS against the kept step, on blocks with `layer`; `flip` is `between` or `never`."""
    make = partial(Dropped, 0.3) if layer == "dropout" else Normed
    kept, model = (chain(make, 3).to(bench.device) for _ in range(2))
    flips = flip == "between"
    expected = _flipped_step(kept, KEEP_ALL, bench, flips=flips)
    policy = Policy.recompute(block_names(model), **CHECKPOINTS[label])
    return compared_row(label, expected, attempt(partial(_flipped_step, model, policy, bench, flips=flips)))


def _flipped_step(model: nn.Module, policy: Policy, bench: LabBench, *, flips: bool) -> Gradients:
    with apply_policy(model, policy):
        torch.manual_seed(0)
        loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
        if flips:
            model.eval()
        loss.backward()
    return gradients_of(model)
