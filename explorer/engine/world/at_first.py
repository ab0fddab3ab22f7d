"""Restores counters and flags on classes and in files, which all models of a process share.

A factory that builds a new model does not reset such values, so two runs would differ. Plain values are put back. A
container that a run changes in place is not put back; the comparison names it as unstable.
"""

from __future__ import annotations

import numbers
from typing import Any

from torch import nn

from explorer.engine.world.remembered import Walk


class AtFirst:
    """Plain values that `model` shares with other models; call `put_back` before each run."""

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
