"""A gradient that was taken with a graph, differentiated again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from explorer.lab.kit.bench import Gradients, gradients_by_name


def hessian_product(model: nn.Module, along: Callable[[nn.Parameter], Tensor]) -> Gradients:
    """The Hessian times the direction `along(parameter)`, from gradients that backward(create_graph=True) left."""
    terms = [(p.grad * along(p).to(p)).sum() for p in model.parameters() if p.grad is not None]
    return gradients_by_name(torch.stack(terms).sum(), model, allow_unused=True)
