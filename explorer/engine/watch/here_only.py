"""A hook of an instrument, for the module that it was put onto alone.

A training copies and pickles its model whenever it likes (an average of the weights, a checkpoint of the whole model),
and hooks go along. The copy would report to the instrument for ever, and an instrument is nothing to pickle.
"""

from __future__ import annotations

import functools
from typing import Any


class HereOnly(functools.partial[Any]):
    """`HereOnly(function, ...)` is called as that partial is; a copy of it, or what is unpickled, does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


def _left_behind() -> Any:
    return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """All that is left of the hook."""
