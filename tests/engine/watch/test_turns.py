"""Which blocks are told to follow each other: those that a run then takes as one segment, and no others."""

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
from tests.engine.graphs import graph_of


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
