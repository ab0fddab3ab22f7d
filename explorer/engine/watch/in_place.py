"""Keeps a watched backward on the path of an unwatched one.

If a value is used several times, autograd adds its gradients in place unless other code holds them. Under a dispatch
mode autograd never adds in place (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). A shared weight's
gradients then need memory for a sum: 5 to 13 % of the peak of a recurrent net. The watcher therefore repeats
autograd's test on the two gradients and adds in place if the test passes.

The number of references to a gradient without other holders depends on the torch version; a tiny backward measures it.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch

from explorer.engine.watch.uncompiled import DispatchMode

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def sum_of_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The sum, in the storage of one gradient; None if autograd would not add in place: the caller then adds."""
    alone = references_of_the_last_holder()
    if kwargs or len(args) != 2 or alone is None or torch.is_grad_enabled():
        return None
    held = [_references(args, i) if isinstance(args[i], torch.Tensor) else None for i in range(2)]
    old, new = args
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)) or old.shape != new.shape:
        return None
    if old.dtype != new.dtype or not old.dim():
        return None
    for target, other, holders in ((old, new, held[0]), (new, old, held[1])):
        if holders == alone and _dense(target):
            return ADD_IN_PLACE(target, other)  # type: ignore[no-any-return]
    return None


@lru_cache(maxsize=1)
def references_of_the_last_holder() -> tuple[int, int, int] | None:
    """Reference counts of a gradient, its storage and its Python object in a dispatch mode if only autograd's buffer
    holds the gradient. A user's hook that keeps a gradient shows in the last count alone.

    None if this torch has no reference counts.
    """
    if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    seen: list[tuple[int, int, int]] = []

    class Watch(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ADD and not torch.is_grad_enabled():
                seen.append(_references(args, 0))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Watch():
        weight = torch.ones(2, 2, requires_grad=True)
        (torch.ones(2, 2) @ weight @ weight).sum().backward()
    return seen[0] if seen else None


def _references(args: tuple[Any, ...], i: int) -> tuple[int, int, int]:
    """Reference counts of `args[i]`. No other variable here may hold the tensor."""
    count: Any = args[i]._use_count
    storage = args[i].untyped_storage()._cdata
    return count(), torch._C._storage_Use_Count(storage), sys.getrefcount(args[i])  # type: ignore[attr-defined]


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements neither overlap nor leave gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (tensor.stride(i), tensor.shape[i]) for i in range(tensor.dim()) if tensor.shape[i] != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
