"""HiGHS prints a line of its own now and then, with C's own stdout: kept out of what a program prints for others.

`plan --json` is one document, and the stdout of somebody's own script is theirs. While the solver runs, descriptor 1
leads where errors go; C's buffer is emptied before it leads back.
Source: https://github.com/jump-dev/HiGHS.jl/issues/312
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STDOUT, STDERR = 1, 2


class _Stdout:
    """Descriptor 1 of the process, which its threads share: the first solver leads it away, the last one back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_solvers = 0
        self._before: int | None = None
        """Where it led; None: it leads there still, or is closed."""

    def lead_away(self) -> None:
        with self._lock:
            self._n_solvers += 1
            if self._n_solvers > 1:
                return
            with suppress(OSError):
                self._before = os.dup(STDOUT)
                _flush()
                os.dup2(STDERR, STDOUT)

    def lead_back(self) -> None:
        with self._lock:
            self._n_solvers -= 1
            if self._n_solvers or self._before is None:
                return
            _flush()
            os.dup2(self._before, STDOUT)
            os.close(self._before)
            self._before = None


_STDOUT = _Stdout()


@contextmanager
def on_stderr() -> Iterator[None]:
    """What C prints meanwhile goes to stderr; where either is closed, as it was."""
    _STDOUT.lead_away()
    try:
        yield
    finally:
        _STDOUT.lead_back()


def _flush() -> None:
    """Python's buffer and C's; without a C library to ask (Windows) Python's alone."""
    if sys.stdout is not None:
        with suppress(ValueError, OSError):
            sys.stdout.flush()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
