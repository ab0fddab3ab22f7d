"""A net with a little of each trap, and the results of a step that are compared bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.policy.units import observe_recompute
from explorer.engine.state.rng import seed_everything


class Residual(nn.Module):
    """Norm, dropout and a residual: a little of each trap."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.chain = nn.Sequential(Residual(), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.chain(x)


def net(seed: int = 0) -> Net:
    seed_everything(seed)
    return Net()


def bits(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Output, gradients and buffers after one backward, and the next random numbers."""
    model.zero_grad()
    seed_everything(seed)
    x = torch.randn(16, 8, requires_grad=True)
    output = model(x)
    output.square().mean().backward()
    tensors = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return tensors | {"output": output.detach(), "input": x.grad.clone(), "next": torch.rand(3)}  # type: ignore[union-attr]


def assert_same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    wrong = [name for name in expected if not torch.equal(expected[name], actual[name])]
    assert not wrong, wrong


def reruns(model: nn.Module, seed: int = 1) -> list[str]:
    """The units that run again in one step, in order."""
    seen: list[str] = []
    with observe_recompute(lambda fqn, starts: seen.append(fqn) if starts else None):
        bits(model, seed)
    return seen


def second_order(model: nn.Module) -> list[Tensor]:
    """Gradients of the squared norm of the gradient."""
    seed_everything(3)
    loss = model(torch.randn(16, 8)).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters())))
