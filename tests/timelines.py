"""A timeline read entry by entry, beside what the product does with arrays."""

from __future__ import annotations

from explorer.record import Allocations


def alive_at(log: Allocations, tick: int) -> list[int]:
    """Indices of the entries alive at `tick`."""
    return [i for i, (born, died) in enumerate(zip(log.born, log.died)) if born <= tick < died]
