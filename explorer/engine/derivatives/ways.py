"""Seven ways to differentiate a model, each as the tensors it yields: the rows of the derivative matrix.

Every way starts from a fresh trainee, so that all of them see the same weights and the same random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from explorer.engine.model.loaded import call
from explorer.engine.step import Trainee, autocast, forward_backward
from explorer.engine.world.rng import seed_everything
from explorer.record.matrix import DerivativeKind

Derivative = dict[str, Tensor | None]
"""By parameter name; None: this way yields nothing for it."""


def backward(trainee: Trainee) -> Derivative:
    """loss.backward()"""
    forward_backward(trainee)
    return _gradients(trainee)


def autograd_grad(trainee: Trainee) -> Derivative:
    """torch.autograd.grad(loss, parameters)"""
    names, parameters = _parameters(trainee)
    return dict(zip(names, torch.autograd.grad(_loss(trainee), parameters, allow_unused=True), strict=True))


def backward_twice(trainee: Trainee) -> Derivative:
    """loss.backward(retain_graph=True), then loss.backward(): gradients add up to twice the first."""
    trainee.model.zero_grad(set_to_none=True)
    loss = _loss(trainee)
    loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(trainee)


def create_graph(trainee: Trainee) -> Derivative:
    """loss.backward(create_graph=True): gradients with a graph of their own, the entrance to second order."""
    _backward_with_graph(trainee)
    gradients = {name: None if g is None else g.detach() for name, g in _gradients(trainee).items()}
    trainee.model.zero_grad(set_to_none=True)
    return gradients


def hessian_vector_product(trainee: Trainee) -> Derivative:
    """H v for a fixed random v: backward(create_graph=True), then the gradient of gradient · v."""
    _, parameters = _parameters(trainee)
    _backward_with_graph(trainee)
    generator = torch.Generator().manual_seed(trainee.spec.seed)
    terms = []
    for parameter in parameters:
        direction = torch.randn(parameter.shape, generator=generator).to(parameter)
        if parameter.grad is not None:
            terms.append((parameter.grad * direction).sum())
    trainee.model.zero_grad(set_to_none=True)
    torch.stack(terms).sum().backward()
    return _gradients(trainee)


def gradient_penalty(trainee: Trainee) -> Derivative:
    """Backward of loss + |gradient of the loss|²: what a regulariser on gradients does."""
    _, parameters = _parameters(trainee)
    trainee.model.zero_grad(set_to_none=True)
    loss = _loss(trainee)
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    penalty = torch.stack([gradient.square().sum() for gradient in first if gradient is not None]).sum()
    (loss + penalty).backward()
    return _gradients(trainee)


def eval_mode(trainee: Trainee) -> Derivative:
    """loss.backward() of the model in eval mode: no dropout, running statistics used and not moved."""
    trainee.model.eval()
    forward_backward(trainee)
    return _gradients(trainee)


DERIVATIVES: dict[DerivativeKind, Callable[[Trainee], Derivative]] = {
    "backward": backward,
    "autograd.grad": autograd_grad,
    "backward twice": backward_twice,
    "create_graph": create_graph,
    "Hessian-vector product": hessian_vector_product,
    "gradient penalty": gradient_penalty,
    "eval mode": eval_mode,
}


def _loss(trainee: Trainee) -> Tensor:
    seed_everything(trainee.spec.seed)
    with autocast(trainee):
        return trainee.loss_function(call(trainee.model, trainee.inputs), trainee.targets)


def _backward_with_graph(trainee: Trainee) -> None:
    trainee.model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        # torch warns of the cycle between parameter and gradient; zero_grad breaks it.
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        _loss(trainee).backward(create_graph=True)


def _parameters(trainee: Trainee) -> tuple[list[str], list[torch.nn.Parameter]]:
    named = [(name, p) for name, p in trainee.model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [parameter for _, parameter in named]


def _gradients(trainee: Trainee) -> Derivative:
    return {name: parameter.grad for name, parameter in trainee.model.named_parameters() if parameter.requires_grad}
