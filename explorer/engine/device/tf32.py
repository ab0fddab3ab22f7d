"""TensorFloat-32: float32 products on ten bits of mantissa, which torch allows convolutions on a GPU by default.

A gradient through a dozen such convolutions lies a tenth of its norm from exact, too far for a float64 reference.
Judged runs therefore do without TF32, and their comparison states this. Timed runs use what training uses.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def tf32_kinds() -> tuple[str, ...]:
    """Kinds of operators that may use TF32: `convolutions`, `recurrent layers`, `matrix products`."""
    return tuple(kind for kind, switch in _switches().items() if switch.fp32_precision == "tf32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Computes every product in full float32.

    torch has old and new switches and refuses to read an old switch that disagrees with a new one. A model may read
    the old switches, so the old switches are set unless a new one is in use.
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
