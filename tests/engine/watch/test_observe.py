"""One forward, watched operator by operator: bytes that are kept, FLOPs, and where a recompute would stop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.engine.walk_net import ROW, B, W, Walk, graph


def test_flops_are_those_of_the_matrix_products() -> None:
    described = graph(Walk())
    assert described.by_fqn["stem"].forward_flops == 2 * B * W * W
    assert described.by_fqn["blocks.1"].forward_flops == 2 * (2 * B * W * 2 * W)
    assert described.by_fqn[""].forward_flops == 2 * B * W * W + 3 * 8 * B * W * W + 2 * B * W * 2


def test_recompute_runs_until_the_last_tensor_is_saved() -> None:
    """A linear layer saves its input before it multiplies; tanh and a norm save what they made."""
    blocks = graph(Walk()).by_fqn
    up, down = (2 * B * W * 2 * W for _ in range(2))
    assert (blocks["blocks.0"].forward_flops, blocks["blocks.0"].rerun_flops) == (up + down, up)
    assert (blocks["blocks.0.down"].forward_flops, blocks["blocks.0.down"].rerun_flops) == (down, 0)
    smooth = graph(nn.Sequential(nn.Linear(W, W), nn.Tanh())).by_fqn[""]
    assert smooth.rerun_flops == smooth.forward_flops == 2 * B * W * W
    assert (blocks["blocks.0"].last_saved_in, blocks["blocks.0.up"].last_saved_in) == ("blocks.0.down", "blocks.0.up")


class Forked(nn.Module):
    """Hands on two tensors: a linear layer saves the first, the second is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()
        self.after = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x, skip = self.fork(x)
            x = self.after(x) + skip
        return x


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), torch.sigmoid(x)


def test_who_else_saves_an_output_is_known_also_of_a_block_called_twice() -> None:
    blocks = graph(Forked(), torch.randn(B, W, requires_grad=True)).by_fqn
    assert blocks["fork"].outputs_saved_outside == (True, False)
    assert graph(nn.Sequential(nn.Tanh(), nn.Tanh())).by_fqn["0"].outputs_saved_outside == (False,)


def test_who_saves_what_a_block_is_given_and_returns() -> None:
    class Beside(nn.Module):
        """tanh saves what it returns, and so does the linear layer that it is given to; x * y saves x as well."""

        def __init__(self) -> None:
            super().__init__()
            self.tanh, self.linear = nn.Tanh(), nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.linear(self.tanh(x))

    blocks = graph(nn.Sequential(nn.Linear(W, W), Beside())).by_fqn
    assert blocks["1.tanh"].outputs_saved_in == blocks["1.linear"].inputs_saved_in == (("1.linear", "1.tanh"),)
    assert blocks["0"].outputs_saved_in == blocks["1"].inputs_saved_in == blocks["1.tanh"].inputs_saved_in == (("1",),)
    assert blocks["1.linear"].outputs_saved_in == (("1",),)
    assert blocks["1"].outputs_saved_in == (("",),), "the loss squares it"


def test_saved_bytes_are_those_made_in_a_block_whoever_saves_them() -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), nn.Sequential(nn.Tanh(), nn.Sigmoid())))
    assert described.by_fqn["0"].saved_bytes == 0  # tanh keeps its result, not what it was given
    assert described.by_fqn["1.0"].saved_bytes == ROW
    assert described.by_fqn["1"].saved_bytes == 2 * ROW
    model = nn.Sequential(nn.ReLU(), nn.Linear(W, W), nn.Linear(W, W))
    described = graph(model, torch.randn(B, W, requires_grad=True))
    assert [described.by_fqn[fqn].saved_bytes for fqn in ("0", "1", "2", "")] == [
        ROW,
        ROW,
        ROW,
        3 * ROW,
    ]  # the loss saves the last
