"""Lines of a script that branch on values of a GPU: on an imaginary card, where values are zeros, they take one way.

A line branches if Python asks a tensor for its truth, or if `if`, `while` or `assert` reads a number of a tensor.
It also does if values decide the shape of a result, as for `nonzero`.
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
_TRUTH = ((Tensor, "__bool__"), (Tensor, "nonzero"), (Tensor, "masked_select"), (torch, "nonzero"))
_NUMBERS = ((Tensor, "item"), (Tensor, "tolist"), (Tensor, "__float__"), (Tensor, "__int__"))


@contextmanager
def value_branches() -> Iterator[dict[str, None]]:
    """Collects such lines while a script runs, in the order of their first run: `train.py:41: if loss < best:`."""
    lines: dict[str, None] = {}
    with ExitStack() as stack:
        for owner, name in (*_TRUTH, *_NUMBERS):
            stack.enter_context(_watched(owner, name, lines, always=(owner, name) in _TRUTH))
        yield lines


@contextmanager
def _watched(owner: object, name: str, lines: dict[str, None], *, always: bool) -> Iterator[None]:
    """Replaces a function that reads a tensor. The new one does the same and adds the line of its caller."""
    original: Callable[..., object] = getattr(owner, name)

    @wraps(original)
    def read(tensor: object, *args: object, **options: object) -> object:
        if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
            text = _line(sys._getframe(1))
            if text and (always or _BRANCH.search(text)):
                lines.setdefault(text)
        return original(tensor, *args, **options)

    with patch.object(owner, name, read):  # an inherited function is inherited again
        yield


def _line(frame: FrameType) -> str:
    """`train.py:41: if loss < best:`; empty for lines of torch and of this package."""
    file = frame.f_code.co_filename
    if file.startswith((_LIBRARY, str(Path(__file__).parents[2]))):
        return ""
    return f"{Path(file).name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
