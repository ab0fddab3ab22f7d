"""Pack hooks of whoever only looks at what autograd saves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


def looking_at_saved(look: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """`look` is called with each tensor that autograd saves, which stays saved. No mode sees what this does itself.

    Source: torch.autograd.graph.saved_tensors_hooks.
    """

    def pack(tensor: Tensor) -> Tensor:
        look(tensor)
        return let_go(tensor)

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def let_go(tensor: Tensor) -> Tensor:
    """What a hook returns that keeps `tensor`: without the operation that made it.

    Returned as it is, an output that its own operation saves (exp, softmax, tanh) would hold that operation and thereby
    itself, until a backward that may never come.
    """
    if tensor.is_leaf:
        return tensor
    with _disable_current_modes():
        return tensor.detach()
