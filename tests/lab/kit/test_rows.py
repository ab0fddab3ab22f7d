"""The comparison that every row rests on."""

from __future__ import annotations

import pytest
import torch

from explorer.lab.kit.rows import EQUAL_TENSORS, gap


def test_a_doubled_gradient_is_seen() -> None:
    """The comparison that every row rests on has teeth: a cosine alone would call this equal."""
    right = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    doubled = gap(
        right, {name: 2 * gradient for name, gradient in right.items()}, {n: g.double() for n, g in right.items()}
    )
    assert (
        doubled.outcome == "different"
        and doubled.distance == pytest.approx(1.0)
        and doubled.cosine == pytest.approx(1.0)
    )
    assert gap(right, {**right, "bias": None}).outcome == "missing"
    assert next(f.value for f in gap(right, right).figures() if f.name == EQUAL_TENSORS) == 2
