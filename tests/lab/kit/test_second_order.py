"""A Hessian-vector product of a loss whose Hessian is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.lab.kit.second_order import hessian_product


@pytest.mark.filterwarnings("ignore:Using backward")
def test_of_a_cubic_it_is_six_times_the_weight_along_the_direction() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.idle = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(1))

    model = Cubic()
    (model.w**3).sum().backward(create_graph=True)
    product = hessian_product(model, lambda parameter: torch.tensor([1.0, -1.0]))
    model.zero_grad()  # the cycle between parameter and gradient
    assert product["w"].tolist() == [6.0, -12.0] and product.get("idle") is None
