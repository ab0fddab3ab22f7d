"""A policy and torch.compile: compiled blocks are recomputed like any other, and so is what is compiled around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import KEEP_ALL, Policy

BLOCKS = ("0", "1", "2")
ALL, SEGMENT = Policy.recompute(BLOCKS), Policy.recompute([("blocks.0", "blocks.1", "blocks.2")])
BACKEND = "aot_eager"
"""Traces forward and backward as inductor does, and compiles nothing: the bits stay those of the kernels."""

Compiled = tuple[nn.Module, nn.Module]
"""The model to police, and what to call."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in BLOCKS))


def blocks_compiled() -> Compiled:
    model = net()
    for name in BLOCKS:
        model._modules[name] = torch.compile(model._modules[name], backend=BACKEND)  # type: ignore[assignment]
    return model, model


def whole_compiled() -> Compiled:
    model = net()
    return model, torch.compile(model, backend=BACKEND)


class InTurn(nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(net())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def segment_of_compiled_blocks() -> Compiled:
    model = InTurn()
    for name in BLOCKS:
        block = model.blocks._modules[name]
        model.blocks._modules[name] = torch.compile(block, backend=BACKEND)  # type: ignore[assignment]
    return model, model


def segment_compiled_whole() -> Compiled:
    model = InTurn()
    return model, torch.compile(model, backend=BACKEND)


def step(compiled: Compiled, policy: Policy) -> tuple[list[Tensor], int]:
    """Gradients of the second step, and bytes saved for its backward, parameters excluded."""
    model, called = compiled
    apply_policy(model, policy)
    constant = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in constant:
            held[storage._cdata] = storage.nbytes()
        return tensor

    for _ in range(2):
        model.zero_grad()
        held.clear()
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = called(torch.linspace(-1, 1, 64).reshape(4, 16)).square().mean()
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], sum(
        held.values()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer reads it, torch 2.13
@pytest.mark.parametrize(
    ("compiled", "policy", "is_effective"),
    [
        (blocks_compiled, ALL, True),
        (whole_compiled, ALL, True),
        (segment_of_compiled_blocks, SEGMENT, True),
        (segment_compiled_whole, SEGMENT, False),  # dynamo looks past a module's own way of being called
    ],
)
def test_a_compiled_model_recomputes_to_the_same_bits(
    compiled: Callable[[], Compiled], policy: Policy, is_effective: bool
) -> None:
    torch._dynamo.reset()
    expected, kept_bytes = step(compiled(), KEEP_ALL)
    gradients, held_bytes = step(compiled(), policy)
    assert len(gradients) == len(expected) == 2 * len(BLOCKS)
    assert all(map(torch.equal, gradients, expected))
    assert held_bytes < kept_bytes if is_effective else held_bytes == kept_bytes
