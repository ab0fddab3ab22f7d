"""Counters and flags on classes and in files, as they were before any run: all models of a process have them in common.

Where a factory builds a model anew, these go on where the last run left them, and no two runs would agree. Plain values
are put back; a container that is changed in place is not, and is named as one about which two runs do not agree.
"""

from __future__ import annotations

import numbers
from typing import Any

from torch import nn

from explorer.engine.world.remembered import Walk


class AtFirst:
    """Plain values that `model` has in common with others; `put_back` before each run."""

    def __init__(self, model: nn.Module) -> None:
        walk = Walk(model)
        for module in model.modules():
            walk.meet(type(module))
        self._values = [(place, place.value) for place in walk.common() if _is_plain(place.value)]

    def put_back(self) -> None:
        for place, value in self._values:
            if place.value is not value:
                place.put(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str, bytes, numbers.Number))
