"""Offload: what leaves, how often, and that backward gets exactly what was saved."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.policy.offload import HOST, Back, offload_saved, to_host


class Lane:
    """Copies as a GPU's stream would, at once, and counts the ways."""

    def __init__(self) -> None:
        self.out_bytes: list[int] = []
        self.n_back = 0

    def __call__(self, tensor: Tensor) -> Back:
        self.out_bytes.append(tensor.nbytes)
        kept = tensor.detach().clone()

        def back() -> Tensor:
            self.n_back += 1
            return kept.clone()

        return back


def gradients(model: nn.Module, x: Tensor, lane: Lane | None) -> list[Tensor]:
    model.zero_grad()
    with offload_saved([model], lane):
        loss = model(x).square().sum()
    gc.collect()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_backward_gets_what_was_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(6)))
    x, lane = torch.randn(8, 16), Lane()
    kept = gradients(model, x, None)
    assert all(torch.equal(one, other) for one, other in zip(kept, gradients(model, x, lane), strict=True))
    assert lane.out_bytes and lane.n_back >= len(lane.out_bytes)


def test_what_stays_is_free_once_nobody_uses_it() -> None:
    """An output that its own operation saves, and no backward: what a unit around it made again, for instance."""
    x = torch.randn(4, requires_grad=True)
    with offload_saved([]):
        gone = weakref.ref(x.exp())
    assert gone() is None


def test_a_tensor_that_several_save_crosses_once() -> None:
    lane, x = Lane(), torch.randn(32, 32, requires_grad=True)
    with offload_saved([], lane):
        y = x.exp()
        loss = (y * y).sum() + y.square().sum() + y.sin().sum()
    assert lane.out_bytes == [y.nbytes]
    loss.backward()
    assert x.grad is not None and torch.allclose(x.grad, (4 * y + y.cos()) * y)


def test_an_address_that_is_handed_out_again_is_another_tensor() -> None:
    """The copy outlives the tensor: the next one at its address has to cross too."""
    lane, x = Lane(), torch.ones(1000, requires_grad=True)
    with offload_saved([], lane):
        total = torch.zeros(())
        for i in range(20):
            total = total + ((x * float(i)).detach() * x).sum()
    total.backward()
    assert x.grad is not None and x.grad.tolist() == [sum(range(20))] * 1000


def test_what_is_expanded_crosses_unexpanded() -> None:
    lane, x = Lane(), torch.randn(4, 1, requires_grad=True)
    wide, other = x.detach().expand(4, 1000), torch.randn(4, 1000, requires_grad=True)
    with offload_saved([], lane):
        loss = (wide * other).sum()
    assert lane.out_bytes == [x.nbytes]
    loss.backward()
    assert other.grad is not None and torch.equal(other.grad, wide)


def test_parameters_stay_and_the_cpu_moves_nothing() -> None:
    model, lane = nn.Linear(8, 8, bias=False), Lane()
    with offload_saved([model], lane):
        model(torch.randn(2, 8, requires_grad=True)).sum()
    assert model.weight.nbytes not in lane.out_bytes
    assert to_host(torch.ones(3)) is None


def test_bytes_on_the_host_are_counted_until_nobody_holds_them() -> None:
    HOST.restart()
    before, x = HOST.peak_bytes, torch.randn(256, requires_grad=True)
    with offload_saved([], Lane()):
        loss = x.exp().sum()
    assert HOST.peak_bytes - before == 1024
    loss.backward()
    del loss
    gc.collect()
    HOST.restart()
    assert HOST.peak_bytes == before


@pytest.mark.parametrize("n_times", [1, 3])
def test_what_is_there_is_not_brought_again(n_times: int) -> None:
    lane, x = Lane(), torch.randn(16, requires_grad=True)
    with offload_saved([], lane):
        y = x.exp()
        loss = (y * y).sum()
    for _ in range(n_times):
        loss.backward(retain_graph=True)
    assert lane.n_back <= 2 * n_times  # once for the product, once for the exponential
