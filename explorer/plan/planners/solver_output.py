"""Redirects stdout while HiGHS runs, because HiGHS sometimes prints lines to the stdout of C.

`plan --json` prints one document, and a user's script owns its stdout. While the solver runs, descriptor 1 points to
stderr. C's buffer is flushed before descriptor 1 is restored.
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
    """Descriptor 1 of the process, shared by all threads: the first solver redirects it, the last restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_solvers = 0
        self._before: int | None = None
        """A copy of descriptor 1 before the redirect; None if stdout is not redirected, or closed."""

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
    """Redirects prints of C to stderr in the block; does nothing if stdout or stderr is closed."""
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
