"""Pack hooks that observe the tensors that autograd saves, and keep them saved."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


def looking_at_saved(look: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """Calls `look` with each tensor that autograd saves; the tensor stays saved. Modes do not see the hook's work.

    Source: torch.autograd.graph.saved_tensors_hooks.
    """

    def pack(tensor: Tensor) -> Tensor:
        look(tensor)
        return let_go(tensor)

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def let_go(tensor: Tensor) -> Tensor:
    """The tensor without the operation that made it, as the return value of a pack hook.

    Some operations save their own output (exp, softmax, tanh). An output that is not detached would hold the operation
    and thereby itself, until a backward that may never come.
    """
    if tensor.is_leaf:
        return tensor
    with _disable_current_modes():
        return tensor.detach()
