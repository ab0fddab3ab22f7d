"""Compares two copies of a model's state, and writes a copy as short text. remembered.py makes the copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from explorer.engine.world.bits import same_bits

_MAX_TEXT = 40


def same_state(left: Any, right: Any) -> bool:
    """Whether two frozen values are equal, tensors bit by bit; NaN equals NaN."""
    return _same(left, right, {})


def _same(left: Any, right: Any, known: dict[tuple[int, int], bool]) -> bool:
    """As `same_state`. `known` has the results of earlier pairs, because one image may occur in many places."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (Tensor, dict, list)):
        pair = id(left), id(right)
        if pair not in known:
            known[pair] = same_bits(left, right) if isinstance(left, Tensor) else _same_parts(left, right, known)
        return known[pair]
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _same_parts(left: Any, right: Any, known: dict[tuple[int, int], bool]) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key], known) for key in left)
    return len(left) == len(right) and all(_same(one, other, known) for one, other in zip(left, right))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain parts of a frozen value, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def short(value: Any) -> str:
    """A frozen value as short text."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return _cut(f"{value.item():.6g}" if value.is_floating_point() else str(value.item()))
        first = ", ".join(f"{number:.5g}" for number in value.flatten()[:3].tolist())
        return f"{first}, … ({' x '.join(map(str, value.shape))})"
    if isinstance(value, list) and value and isinstance(value[0], int):
        return f"{value[0]} items"
    if isinstance(value, list):
        return str(value[0]) if value else "empty"
    if isinstance(value, dict):
        return f"{len(value)} items"
    return "absent" if value is None else _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
