"""TensorFloat-32: float32 products on ten bits of mantissa, which torch allows convolutions on a GPU by default.

A gradient through a dozen such convolutions lies a tenth of its norm from exact: no float64 reference can judge by
that, so runs that are judged do without, and say so. Runs that are timed and measured use what training uses.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def tf32_kinds() -> tuple[str, ...]:
    """The kinds of operators that may use it: `convolutions`, `recurrent layers`, `matrix products`."""
    return tuple(kind for kind, switch in _switches().items() if switch.fp32_precision == "tf32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Every product in full float32.

    torch has old switches and new ones, and refuses to read an old one where a new one disagrees: whatever a model
    reads inside or afterwards has to go on working, so the old ones are used wherever nobody used the new.
    """
    cudnn: Any = torch.backends.cudnn
    with ExitStack() as stack:
        try:
            stack.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            cudnn.allow_tf32 = False
        except RuntimeError:
            _switch_off(stack, "convolutions", "recurrent layers")
        try:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            _switch_off(stack, "matrix products")
        yield


def _switch_off(stack: ExitStack, *kinds: str) -> None:
    for switch in (_switches()[kind] for kind in kinds):
        stack.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
        switch.fp32_precision = "ieee"


def _switches() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
        "matrix products": backends.cuda.matmul,
    }
