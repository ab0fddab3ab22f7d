"""Lines of a script that branch on values of a GPU: on an imaginary card, where values are zeros, they take one way.

A line branches if Python asks a tensor for its truth, or if `if`, `while` or `assert` reads a number of a tensor.
It also does if values decide the shape of a result, as for `nonzero` and for a mask as an index.
Lines of torch are left out: a scaler that looks for NaN goes on.
Only the process that sees the card imports torch, so this file is apart from run.py.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import torch
from torch import Tensor

_BRANCH = re.compile(r"\b(if|elif|while|assert)\b")
_LIBRARY = str(Path(torch.__file__).parent)
_TRUTH = ("__bool__", "is_nonzero", "equal", "allclose")
_NUMBERS = ("item", "tolist", "__float__", "__int__")
_SHAPES = (
    "nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
    "__getitem__",
)  # fmt: skip
"""Methods of a tensor, and functions of torch with the same name."""


@contextmanager
def value_branches() -> Iterator[dict[str, None]]:
    """Collects such lines while a script runs, in the order of their first run: `train.py:41: if loss < best:`."""
    lines: dict[str, None] = {}
    with ExitStack() as stack:
        for owner in (Tensor, torch):
            for name in (*_TRUTH, *_NUMBERS, *_SHAPES):
                if hasattr(owner, name):
                    stack.enter_context(_watched(owner, name, lines))
        yield lines


@contextmanager
def _watched(owner: object, name: str, lines: dict[str, None]) -> Iterator[None]:
    """Replaces a function that reads a tensor. The new one does the same and adds the line of its caller."""
    original: Callable[..., object] = getattr(owner, name)

    @wraps(original)
    def read(*args: object, **options: object) -> object:
        if any(map(_is_on_card, args)) and (name not in _SHAPES or _shape_is_of_values(name, args)):
            text = _line(sys._getframe(1))
            if text and (name not in _NUMBERS or _BRANCH.search(text)):
                lines.setdefault(text)
        return original(*args, **options)

    with patch.object(owner, name, read):  # an inherited function is inherited again
        yield


def _is_on_card(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _shape_is_of_values(name: str, args: tuple[object, ...]) -> bool:
    """Whether the shape of the result depends on values: `where` with a choice of two tensors keeps the shape."""
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":
        return len(args) == 1 or _is_on_card(args[1])
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else args[1:]
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return True


def _line(frame: FrameType) -> str:
    """`train.py:41: if loss < best:`; empty for lines of torch and of this package."""
    file = frame.f_code.co_filename
    if file.startswith((_LIBRARY, str(Path(__file__).parents[2]))):
        return ""
    return f"{Path(file).name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
