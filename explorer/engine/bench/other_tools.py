"""A block's autograd graph, kept and recomputed, drawn by torchviz."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torchviz
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.bench.measure import Meter
from explorer.engine.bench.step import torch_device
from explorer.engine.model.conditions import under_conditions
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.rng import seed_everything
from explorer.engine.watch.scopes import looking_at_saved
from explorer.errors import BadInput, nearest
from explorer.record.graph import AutogradPicture, AutogradPictures
from explorer.record.plan import Report, silent
from explorer.record.policy import Policy
from explorer.record.run import RunSpec


def draw_autograd(spec: RunSpec, block: str, report: Report = silent) -> AutogradPictures:
    """The graph of `block` alone, kept and recomputed, on the block's input in a real forward.

    Recompute is drawn under the options of `spec.policy`. Non-reentrant checkpointing keeps the nodes and empties
    them; reentrant checkpointing replaces the nodes by one. Drawn by torchviz (github.com/szagoruyko/pytorchviz).
    Raises BadInput for a block that does not exist or is never called, ModelFailed for a model that raises.
    """
    meter = Meter(report, 3)
    with preserve_global_state():
        meter(f"loading {spec.model.target}")
        loaded = under_conditions(load_for(spec), replace(spec.conditions, frozen=()), torch_device(spec))
        args, kwargs = _inputs_of(loaded, block)
        meter("drawing the block kept")
        plain = _picture(loaded.model, block, args, kwargs, show_saved=True)
        meter("drawing the block recomputed")
        with apply_policy(loaded.model, replace(spec.policy, units=Policy.recompute([block]).units)):
            recomputed = _picture(loaded.model, block, args, kwargs, show_saved=False)
        return AutogradPictures(block=block, kept=plain, recomputed=recomputed)


def _inputs_of(loaded: Loaded, block: str) -> tuple[object, object]:
    modules = dict(loaded.model.named_modules())
    if block not in modules:
        raise BadInput(f"The model has no block {block!r}.", hint=nearest(block, modules))
    calls: list[object] = []
    hook = modules[block].register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    with hook, blaming(loaded.ref, loaded.inputs, "forward"), torch.no_grad():
        loaded.output()
    if not calls:
        raise BadInput(f"The block {block!r} is never called.", hint="Choose one of the blocks inside it.")
    return tree_map(_leaf, calls[0])


def _leaf(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _picture(model: nn.Module, block: str, args: Any, kwargs: Any, *, show_saved: bool) -> AutogradPicture:
    module = model.get_submodule(block)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()

    seed_everything(0)
    with torch.enable_grad(), looking_at_saved(note):
        output = module(*args, **kwargs)
    outputs = tuple(leaf for leaf in tensor_leaves(output) if leaf.grad_fn is not None)
    if not outputs:
        raise BadInput(f"The block {block!r} makes nothing that backward could pass through.")
    names: dict[str, Tensor] = {
        f"{block}.{name}".lstrip("."): parameter for name, parameter in module.named_parameters()
    }
    names |= {f"input {i}": leaf for i, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)}
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torchviz 0.0.3 asks distutils
        dot = torchviz.make_dot(outputs, params=names, show_saved=show_saved)
    return AutogradPicture(
        dot=dot.source, n_nodes=_n_nodes(outputs), n_saved_tensors=len(saved), saved_bytes=sum(saved.values())
    )


def _n_nodes(outputs: tuple[Tensor, ...]) -> int:
    """Nodes that backward passes through, accumulation into parameters included."""
    nodes, waiting = set(), [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return len(nodes)
