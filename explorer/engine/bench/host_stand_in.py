"""The CPU stands in for a device whose tensors move to the host: copies lie in memory that no instrument counts.

policy/offload.py moves tensors of a GPU, and is part of exported files, which need torch alone. A tensor without data
has no bytes to copy: its way back makes a tensor of its shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from explorer.engine.policy.offload import HOST, Back


@contextmanager
def host_stand_in() -> Iterator[None]:
    """Inside, an offloaded tensor of the CPU leaves the counted memory, and comes back into it."""
    before, HOST.stand_in = HOST.stand_in, _copied_out
    try:
        yield
    finally:
        HOST.stand_in = before


def _copied_out(tensor: Tensor) -> Back:
    with _disable_current_modes():
        size, empty = tensor.size(), tensor.new_empty(0)
        place = torch.empty_like(torch.empty_strided(size, tensor.stride(), device="meta")).stride()
        host = None
        if not is_fake(tensor):
            n_bytes = tensor.nbytes or tensor.element_size()  # torch refuses another type for no bytes
            memory = torch.from_numpy(np.empty(n_bytes, dtype=np.uint8))
            host = memory.view(tensor.dtype).as_strided(size, place).copy_(tensor)

    def back() -> Tensor:
        here = empty.new_empty_strided(size, place)
        return here if host is None else here.copy_(host)

    return back
