"""Lines of a script that branch on values of a GPU: on an imaginary card, where values are zeros, they take one way.

A line branches if Python asks a tensor for its truth, or if `if`, `while` or `assert` reads a number of a tensor.
It also does if values decide the shape of a result, as for `nonzero` and for a mask as an index.
Lines of torch are left out: a scaler that looks for NaN goes on. But if such a shape is made in torch, or if LBFGS ends
because a gradient is zero, the line that called torch is taken.
Only the process that sees the card imports torch, so this file is apart from run.py.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import torch
from torch import Tensor

_BRANCH = re.compile(r"\b(if|elif|while|assert)\b")
_SUITE = re.compile(r"\s*(if|elif|while)\b.*:\s+\S")
"""A line up to a call behind the condition: `if step % 9 == 0: print(` before `loss.item()`."""
_LIBRARY, _PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])
_TRUTH = ("__bool__", "is_nonzero", "equal", "allclose")
_LBFGS = str(Path("optim", "lbfgs.py"))
_NUMBERS = ("item", "tolist", "__float__", "__int__")
_SHAPES = (
    "nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
    "__getitem__", "coalesce",
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
            frame = sys._getframe(1)
            text = _line(frame, is_shape=name in _SHAPES)
            if text and (name not in _NUMBERS or (_BRANCH.search(text) and not _is_behind_condition(frame))):
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
    if name == "coalesce":
        return isinstance(args[0], Tensor) and not args[0].is_coalesced()
    if name == "repeat_interleave":
        return len(args) == 1 or _is_on_card(args[1])
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else args[1:]
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return True


def _line(frame: FrameType, *, is_shape: bool) -> str:
    """`train.py:41: if loss < best:`; empty for lines of this package, and for those of torch that change no bytes."""
    file = frame.f_code.co_filename
    if file.startswith(_PACKAGE) or (file.startswith(_LIBRARY) and not is_shape and not file.endswith(_LBFGS)):
        return ""
    while file.startswith((_LIBRARY, _PACKAGE)) and frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
    return f"{Path(file).name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"


def _is_behind_condition(frame: FrameType) -> bool:
    """Whether the call that `frame` is in stands on the line of an `if`, and not in its condition."""
    _, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return _SUITE.match(line[:column]) is not None
