"""The line of the user's code that runs now: `loss (train.py:41)`, for bytes that no module owns.

A loss, a training loop and a method of the model are code outside of modules, so a file and a line name them. The code
of an installed package is named by the line that calls it. If the user has written none of the running code, the line
is that of the package.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

_SKIPPED = tuple(f"{path}/" for path in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_FOLDERS = ("/site-packages/", "/dist-packages/")
SKIPPED, INSTALLED, OWN = range(3)


class Lines:
    """Numbers the lines that it meets; number 0 is no line."""

    def __init__(self) -> None:
        self.texts = [""]
        self._numbers: dict[tuple[int, int], int] = {}
        """Number by code object and instruction. A frame computes its line from a table, which takes longer."""
        self._origins: dict[int, int] = {}
        self._codes: list[CodeType] = []
        """The code objects, so that no identity is given away: the hash of a code object reads all of its parts."""

    def number(self, frame: FrameType | None) -> int:
        """Number of the innermost line of the user's code, from `frame` outwards."""
        package: FrameType | None = None
        origins = self._origins
        while frame is not None:
            code = frame.f_code
            origin = origins.get(id(code))
            if origin is None:
                origin = origins[id(code)] = _origin(code.co_filename)
                self._codes.append(code)
            if origin == OWN:
                break
            if origin == INSTALLED and package is None:
                package = frame
            frame = frame.f_back
        frame = frame or package
        if frame is None:
            return 0
        key = id(frame.f_code), frame.f_lasti
        number = self._numbers.get(key)
        if number is None:
            text = text_of(frame)
            if text not in self.texts:
                self.texts.append(text)
            number = self._numbers[key] = self.texts.index(text)
        return number


def line_of_model() -> str:
    """`net.py:14`: the innermost line outside of torch and this package; empty if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _origin(frame.f_code.co_filename) != SKIPPED:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def text_of(frame: FrameType) -> str:
    """`loss (train.py:41)`; at the top of a file, and in a comprehension, only file and line."""
    code = frame.f_code
    line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
    name = "lambda" if code.co_name == "<lambda>" else code.co_name
    return line if name.startswith("<") else f"{name} ({line})"


def _origin(file: str) -> int:
    if file.startswith((*_SKIPPED, "<")):
        return SKIPPED
    return INSTALLED if file.startswith(_STANDARD) or any(folder in file for folder in _FOLDERS) else OWN
