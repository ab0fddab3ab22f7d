"""Each way yields what a pencil does, on a loss whose derivatives are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.derivatives.ways import DERIVATIVES
from explorer.engine.step import Trainee, prepare
from explorer.record.run import RunSpec
from tests.engine import trap_nets


class Cube(nn.Module):
    """w³ summed: gradient 3w², Hessian 6w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w**3 * (1.0 if self.training else 2.0)


def trainee() -> Trainee:
    made = prepare(RunSpec(model=trap_nets.ref("plain")))
    made.model, made.inputs, made.targets = Cube(), torch.ones(1), None
    made.loss_function = lambda output, targets: output.sum()
    return made


W = torch.tensor([1.0, 2.0])
FIRST = 3 * W**2
DIRECTION = torch.randn(2, generator=torch.Generator().manual_seed(0))
EXPECTED = {
    "backward": FIRST,
    "autograd.grad": FIRST,
    "backward twice": 2 * FIRST,
    "create_graph": FIRST,
    "Hessian-vector product": 6 * W * DIRECTION,
    "gradient penalty": FIRST + 2 * FIRST * 6 * W,
    "eval mode": 2 * FIRST,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_cube(name: str) -> None:
    yielded = DERIVATIVES[name](trainee())["w"]
    assert yielded is not None
    torch.testing.assert_close(yielded, EXPECTED[name])
    assert not yielded.requires_grad
