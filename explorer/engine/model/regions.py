"""Regions of torch_remat around plain functions, as modules: a policy, the tracker and the graph know modules alone.

`remat.region(function, "mix", recompute=False)` inside a layer becomes the child `mix` of the layer. The child has no
parameters and calls the function. A region around a module is that module already. torch_remat decides as before what
is kept and what runs again; only the call of the function goes through the child.

    layer.body ─ region "mix" ─ _run_save_op ─ function            as torch_remat has it
    layer.body ─ region "mix" ─ _run_save_op ─ layer.mix ─ function

Names of regions are known once a forward has run. A second model without data runs it, so the first keeps its state.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from explorer.engine.device.without_data import without_data
from explorer.engine.model.loaded import Loaded
from explorer.engine.state.global_state import preserve_global_state

RUNNERS = ("_run_save_op", "_run_recompute_op")
"""Functions of torch_remat 0.2.2 that run a region in a checkpoint: (state, name, function, args, kwargs)."""
CALL = nn.Module._call_impl.__code__
_adding: list[bool] = []
"""Not empty while a forward adds the missing children."""


class Region(nn.Module):
    """A region around a function, which every call passes: an owner may have several regions of one name scope."""

    def forward(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)


def add_regions(loaded: Loaded, another: Callable[[], Loaded]) -> None:
    """Adds a child for each region around a function that the forward calls in a checkpoint of torch_remat.

    `another` builds an equal model. A model gets none if no file of its modules imports torch_remat, or if it cannot
    run without data.
    """
    remat = sys.modules.get("torch_remat._api")
    if remat is None or _adding or not any(map(_imports_remat, {type(module) for module in loaded.model.modules()})):
        return
    for name in RUNNERS:
        plain = getattr(remat, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(remat, name, _through_children(plain))
    # A model that decides by values, for example, cannot run without data. Its regions stay inside the modules around.
    with suppress(Exception), preserve_global_state(), without_data(), torch.enable_grad(), _children_are_added():
        twin = another()
        twin.output()
        for fqn, module in twin.model.named_modules():
            if isinstance(module, Region):
                owner, _, name = fqn.rpartition(".")
                loaded.model.get_submodule(owner).add_module(name, Region())


def _imports_remat(kind: type[nn.Module]) -> bool:
    """Whether the file of a module's `forward` has torch_remat, or a part of it, under any name."""
    values = list(getattr(kind.forward, "__globals__", {}).values())
    names = [x.__name__ for x in values if isinstance(x, ModuleType)]
    names += [str(x.__module__) for x in values if isinstance(x, FunctionType)]
    return any(name.partition(".")[0] == "torch_remat" for name in names)


@contextmanager
def _children_are_added() -> Iterator[None]:
    _adding.append(True)
    try:
        yield
    finally:
        _adding.pop()


def _through_children(plain: Callable[..., object]) -> Callable[..., object]:
    """`plain`, whose calls of functions go through the child for the region. A replay has the child of its forward."""

    @functools.wraps(plain)
    def run(state: Any, name: str, function: Callable[..., object], args: object, kwargs: object) -> object:
        children: dict[str, Region | None] = vars(state.region_state).setdefault("children", {})
        if name not in children and not isinstance(function, nn.Module):
            children[name] = _child(_running(sys._getframe(1)), name)
        child = children.get(name)
        return plain(state, name, function if child is None else functools.partial(child, function), args, kwargs)

    return run


def _child(owner: nn.Module | None, region: str) -> Region | None:
    """The owner's child for a region. A container gets none: its forward walks over its children."""
    if owner is None or type(owner).forward is nn.Sequential.forward:
        return None
    name = region.replace(".", "_").replace("/", "_")
    if name not in owner._modules and hasattr(owner, name):  # a region is often named as the method that it calls
        name = f"{name}_region"
    if _adding and not hasattr(owner, name):
        owner.add_module(name, Region())
    child = owner._modules.get(name)
    return child if isinstance(child, Region) else None


def _running(frame: FrameType | None) -> nn.Module | None:
    """The innermost running module. Locals of other frames stay unread: reading them would hold their tensors."""
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
