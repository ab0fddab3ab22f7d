"""HiGHS prints a line of its own now and then, with C's own stdout: kept out of what a program prints for others.

`plan --json` is one document, and the stdout of somebody's own script is theirs. While the solver runs, descriptor 1
leads where errors go; C's buffer is emptied before it leads back.
Source: https://github.com/jump-dev/HiGHS.jl/issues/312
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STDOUT, STDERR = 1, 2


@contextmanager
def on_stderr() -> Iterator[None]:
    """What C prints meanwhile goes to stderr; where either is closed, as it was."""
    try:
        before = os.dup(STDOUT)
    except OSError:
        yield
        return
    try:
        _flush()
        with suppress(OSError):
            os.dup2(STDERR, STDOUT)
        yield
    finally:
        _flush()
        os.dup2(before, STDOUT)
        os.close(before)


def _flush() -> None:
    """Python's buffer and C's; without a C library to ask (Windows) Python's alone."""
    if sys.stdout is not None:
        with suppress(ValueError, OSError):
            sys.stdout.flush()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
