"""A hook of an instrument that works on its own module alone, not on copies of the module.

A training may copy or pickle its model with its hooks (an average of the weights, a checkpoint of the whole model).
The copy would keep reporting to the instrument, and an instrument cannot be pickled.
"""

from __future__ import annotations

import functools
from typing import Any


class HereOnly(functools.partial[Any]):
    """A functools.partial whose copies and unpickled forms do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


def _left_behind() -> Any:
    return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The copy of a hook: does nothing."""
