"""Facts of blocks in one forward: saved bytes, FLOPs, the end of a recompute, and blocks that could be one segment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.errors import InvalidPolicy
from explorer.plan.hazards.hazards import hazards
from explorer.record.policy import Policy
from tests.engine.graphs import ROW, B, W, Walk, graph, graph_of


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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x) * scale))


class Loop(nn.Module):
    """Calls four layers; what happens between the second and the third is the case."""

    def __init__(self, between: Callable[[Tensor, Tensor, list[Any]], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 8)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = []
        scale = x.mean()
        for i, layer in enumerate(self.layers):
            if i == 2:
                x, scale = self._between(x, scale, kept)
            x = layer(x, scale)
        for one in kept:
            x = x + one
        return self.head(x)


def nothing(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return x, scale


def another_argument(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return x, scale * 2


def added_to(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return x + 1, scale


def collected(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    kept.append(x)
    return x, scale


def decided(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return (x, scale) if bool(scale.abs() < 1e9) else (-x, scale)


def drawn(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return (x, scale, torch.rand(()))[:2]


def drawn_by_python(x: Tensor, scale: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
    return (x, scale, random.random())[:2]


CASES = [another_argument, added_to, collected, decided, drawn, drawn_by_python]


def follows(model: nn.Module) -> list[str | None]:
    graph = graph_of(model, torch.randn(4, 8))
    return [graph.by_fqn[f"layers.{i}"].follows for i in range(4)]


def test_layers_that_are_called_one_after_the_other_follow_each_other() -> None:
    assert follows(Loop(nothing)) == ["", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("between", CASES)
def test_a_layer_before_which_more_happens_follows_none(between: Callable[..., Any]) -> None:
    model = Loop(between)
    graph = graph_of(model, torch.randn(4, 8))
    assert [graph.by_fqn[f"layers.{i}"].follows for i in range(4)] == ["", "layers.0", "", "layers.2"]
    across, aside = Policy.recompute([("layers.1", "layers.2")]), Policy.recompute([("layers.0", "layers.1")])
    fired = [hazard for hazard in hazards(graph, across) if hazard.rule == "segment-apart"]
    assert len(fired) == 1 and "layers.1 and layers.2" in fired[0].sentence and fired[0].severity == "error"
    assert not [hazard for hazard in hazards(graph, aside) if hazard.rule == "segment-apart"]


@pytest.mark.parametrize("between", [another_argument, added_to, collected])
def test_what_is_foretold_is_refused(between: Callable[..., Any]) -> None:
    model = Loop(between)
    with apply_policy(model, Policy.recompute([("layers.1", "layers.2")])), pytest.raises(InvalidPolicy):
        model(torch.randn(4, 8)).sum().backward()
    with apply_policy(model, Policy.recompute([("layers.0", "layers.1"), ("layers.2", "layers.3")])):
        model(torch.randn(4, 8)).sum().backward()


def test_what_the_model_returns_is_read_by_others() -> None:
    class Returning(Loop):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
            scale, states = x.mean(), []
            for layer in self.layers:
                x = layer(x, scale)
                states.append(x)
            return self.head(x), states[1:2]

    assert follows(Returning(nothing)) == ["", "layers.0", "", "layers.2"]


def test_a_loop_that_is_walked_twice() -> None:
    class Twice(Loop):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.mean()
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x, scale)
            return self.head(x)

    model = Twice(nothing)
    assert follows(model) == ["", "layers.0", "layers.1", "layers.2"]
