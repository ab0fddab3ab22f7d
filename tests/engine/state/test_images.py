"""Two pictures of what a model remembers are equal bit by bit, and one fits a few words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from explorer.engine.state.state_diff import plain_copy, same_state, short_text


def test_a_structure_that_holds_itself_ends() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert same_state(plain_copy(ring), plain_copy(ring))


@pytest.mark.parametrize(("value", "short_form"), [
    (3, "3"), (0.5, "0.5"), (None, "absent"), ([1, 2], "2 items"), ({"a": 1}, "1 items"),
    ("x" * 99, "'" + "x" * 38 + "…"), (torch.tensor(7), "7"), (torch.tensor(0.25), "0.25"), (math.nan, "nan"),
    (torch.zeros(2, 3), "0, 0, 0, … (2 x 3)"),
])  # fmt: skip
def test_short_form(value: Any, short_form: str) -> None:
    kept: Tensor | Any = plain_copy(value)
    assert short_text(kept) == short_form
