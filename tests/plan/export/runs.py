"""Runs an exported Python file on a model, and counts which blocks ran a second time."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from explorer.plan.export.formats import exported
from explorer.record.files import PolicyFile
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan

Gradients = dict[str, Tensor]
Calls = dict[str, int]
"""How often each module without children was called."""


def file_of(*blocks: str | tuple[str, ...], plan: PipelinePlan | None = None, **options: Any) -> PolicyFile:
    return PolicyFile(policy=Policy.recompute(blocks, **options), pipeline=plan)


def module_of(file: PolicyFile, target: str) -> Any:
    """The exported Python file, imported."""
    module = types.ModuleType("exported")
    sys.modules["exported"] = module  # pickle finds functions by their module
    exec(compile(exported(file, target).text, f"{target}.py", "exec"), module.__dict__)
    return module


def step(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], apply: Callable[[nn.Module], object]
) -> tuple[Gradients, Calls]:
    """Gradients and calls of one step of a copy after `apply`."""
    model = copy.deepcopy(model).train()
    names = {id(module): name for name, module in model.named_modules()}
    apply(model)
    calls: Calls = {}

    def count(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            calls[names[id(module)]] = calls.get(names[id(module)], 0) + 1

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(count)
    torch.manual_seed(0)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients, calls


def ran_again(plain: Calls, calls: Calls, among: tuple[str, ...]) -> set[str]:
    """Blocks `among` in which something ran more often than in `plain`; fails where anything else did.

    A checkpoint may stop its recompute early, so it need not be all that is inside.
    """
    more = {name for name, n in calls.items() if n > plain[name]}
    holder = {name: next((block for block in among if f"{name}.".startswith(f"{block}.")), None) for name in more}
    assert None not in holder.values(), f"ran again outside of {among}: {more}"
    return {block for block in holder.values() if block is not None}


def assert_same(one: Gradients, other: Gradients) -> None:
    assert one.keys() == other.keys() and one
    assert all(torch.equal(one[name], other[name]) for name in one)


class Chain(nn.Module):
    """Five blocks with dropout, in the shape of torchtitan's models: `layers` by number in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8)) for i in range(5)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


LAYERS = tuple(f"layers.{i}" for i in range(5))
PLAN = PipelinePlan(stages=(("embed", *LAYERS[:2]), (*LAYERS[2:], "head")), n_microbatches=4, checkpoint="except_last")


def chain_loss(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.ones(4, 8, requires_grad=True))
    return output.square().mean()


def untouched(model: nn.Module) -> None:
    """Everything is kept."""


def assert_these_alone_run_again(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    apply: Callable[[nn.Module], object],
    chosen: Iterable[str],
    among: tuple[str, ...] = LAYERS,
) -> None:
    """A step after `apply` has the gradients of a plain step. Of the blocks `among`, those `chosen` run again."""
    plain, before = step(model, loss_of, untouched)
    gradients, calls = step(model, loss_of, apply)
    assert ran_again(before, calls, among) == set(chosen)
    assert_same(plain, gradients)
