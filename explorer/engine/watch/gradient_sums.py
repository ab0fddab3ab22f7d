"""What autograd writes in place, in place also under a dispatch mode: sums of gradients, and gradients of selections.

Autograd adds the gradients of a value that is used several times in place, unless other code holds them. Under a
dispatch mode it never does (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). A shared weight's
gradients then need memory for a sum: 5 to 13 % of the peak of a recurrent net. The tracker therefore repeats
autograd's test on the two gradients and adds in place if the test passes.

The gradient of a selection (`max`, `sort`, `gather`, `x[index]`) is written into a tensor of zeros. Under a dispatch
mode it is written into a copy of these zeros (isTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

import torch
from torch._C import _current_autograd_node

from explorer.engine.watch.modes import DispatchMode

aten = torch.ops.aten
ADD, ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor
FILLS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""What writes the gradient of a selection, and its form in place."""
IN_PLACE = {id(func) for func in (ADD, *FILLS)}
"""By identity: an operator of torch computes its hash in Python."""
SELECTIONS = re.compile(
    r"(Max|Min|Median|Nanmedian|Mode|Kthvalue|Sort|Topk|Cummax|Cummin|Gather|Index|IndexSelect|Take|MaskedSelect)"
    r"Backward\d"
)
"""Names of nodes of autograd. Other nodes, and functions of the user, write into tensors that are not theirs."""
is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
    """The result of an operator of IN_PLACE as autograd makes it without a mode; None: the operator has to run."""
    if func is ADD:
        return sum_of_gradients(args, kwargs)
    if torch.is_grad_enabled() or not SELECTIONS.fullmatch(type(_current_autograd_node()).__name__):
        return None
    alone = references_of_the_last_holder()
    if alone is None or _references(args, 0)[1:] != alone[1:]:  # a user's hook runs within the same node
        return None
    return FILLS[func](*args, **kwargs)  # type: ignore[no-any-return]


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
