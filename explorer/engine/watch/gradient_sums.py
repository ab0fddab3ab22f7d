"""The sum of two gradients of one value, in place as autograd adds them.

Autograd adds the gradients of a value that is used several times in place, unless other code holds them. Under a
dispatch mode it never does (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). A shared weight's
gradients then need memory for a sum: 5 to 13 % of the peak of a recurrent net. The tracker therefore repeats
autograd's test on the two gradients and adds in place if the test passes.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch

from explorer.engine.watch.modes import DispatchMode

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def sum_of_gradients(args: tuple[Any, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
    """The sum, in the storage of one gradient; None if autograd would not add in place: the caller then adds."""
    alone = references_of_the_last_holder()
    if kwargs or len(args) != 2 or alone is None or torch.is_grad_enabled():
        return None
    if not all(isinstance(part, torch.Tensor) and part.layout is torch.strided for part in args):
        return None
    references = [_references(args, i) for i in range(2)]
    old, new = args
    if old.shape != new.shape or old.dtype != new.dtype or not old.dim():
        return None
    for target, other, holders in ((old, new, references[0]), (new, old, references[1])):
        if holders == alone and is_dense(target):
            return ADD_IN_PLACE(target, other)  # type: ignore[no-any-return]
    return None


@lru_cache(maxsize=1)
def references_of_the_last_holder() -> tuple[int, int, int] | None:
    """Reference counts of a gradient, its storage and its Python object in a dispatch mode if only autograd's buffer
    holds the gradient. A user's hook that keeps a gradient shows in the last count alone.

    The counts depend on the torch version, so a tiny backward measures them. None if this torch has none.
    """
    if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    counts: list[tuple[int, int, int]] = []

    class Watch(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            if func is ADD and not torch.is_grad_enabled():
                counts.append(_references(args, 0))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Watch():
        weight = torch.ones(2, 2, requires_grad=True)
        (torch.ones(2, 2) @ weight @ weight).sum().backward()
    return counts[0] if counts else None


def _references(args: tuple[Any, ...], i: int) -> tuple[int, int, int]:
    """Reference counts of `args[i]`. No other variable here may hold the tensor."""
    count: Any = args[i]._use_count
    storage = args[i].untyped_storage()._cdata
    return count(), torch._C._storage_Use_Count(storage), sys.getrefcount(args[i])  # type: ignore[attr-defined]
