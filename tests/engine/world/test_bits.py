"""Equal means every bit: NaN payloads, the sign of zero, type and shape."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from explorer.engine.world.bits import same_bits

NAN = torch.tensor([math.nan])
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (NAN, NAN.clone(), True),
        (NAN, OTHER_NAN, False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(2, 3).t().contiguous(), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_two_tensors(left: Tensor, right: Tensor, same: bool) -> None:
    assert same_bits(left, right) == same == same_bits(right, left)
