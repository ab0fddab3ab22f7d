"""Whether two tensors are the same, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in shape, type and every bit; NaN payloads and the sign of zero included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    whole = real.contiguous()
    return whole if whole.dtype is torch.bool else whole.view(_BITS[whole.element_size()])
