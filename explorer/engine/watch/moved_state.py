"""Finds modules whose buffers or plain attributes a forward changes, from images before and after.

Images are cheap: a tensor by its identity and version, a collection by its leaves. Running statistics do not count:
a forward must move them, and a policy has an option for them. second_run.py watches generators call by call.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from explorer.engine.state.rng import is_generator
from explorer.record.graph import Trait

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def state_of(model: nn.Module) -> dict[tuple[str, str], tuple[str, Any]]:
    """(fqn, name) -> (kind, image) of every buffer and plain attribute; a moved value has a different image."""
    images: dict[tuple[str, str], tuple[str, Any]] = {}
    plumbing = set(vars(nn.Module()))
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                images[fqn, name] = ("buffer", (id(buffer), buffer._version))
        for name, value in vars(module).items():
            if name not in plumbing and not isinstance(value, nn.Module) and not is_generator(value):
                images[fqn, name] = ("attribute", _short_image(value))
    return images


def _short_image(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        return type(value), len(value), tuple(_leaf_image(leaf) for leaf in tree_leaves(value))
    return (len(value), _leaf_image(value)) if isinstance(value, set) else _leaf_image(value)


def _leaf_image(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def moved_traits(
    model: nn.Module, before: dict[tuple[str, str], tuple[str, Any]], *, statistics: bool = False
) -> dict[str, set[Trait]]:
    """Traits of the modules whose own buffers or attributes differ from `before`.

    Running statistics of torch's norms count only if `statistics`, because a policy can freeze them.
    """
    after = state_of(model)
    modules = dict(model.named_modules())
    moved: dict[str, set[Trait]] = defaultdict(set)
    for key in before.keys() | after.keys():
        if before.get(key) == after.get(key):
            continue
        fqn, name = key
        kind = (after.get(key) or before[key])[0]
        norm = isinstance(modules[fqn], _NormBase) and modules[fqn].track_running_stats
        if statistics or not (norm and name in RUNNING_STATISTICS):
            moved[fqn].add("moves_buffers" if kind == "buffer" else "moves_attributes")
    return moved
