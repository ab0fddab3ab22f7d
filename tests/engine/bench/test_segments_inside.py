"""Segments inside segments: gradients stay, blocks run as often as the nesting says, and the forecast is exact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.engine.policy.apply import apply_policy, policy_of
from explorer.errors import InvalidPolicy
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import ModelRef, Policy, RunSpec


class Counted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout, self.n_calls = nn.Linear(width, width), nn.Dropout(0.1), 0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        self.n_calls += 1
        y = self.dropout(torch.tanh(self.linear(x)))
        return y if shift is None else y + shift


class Loop(nn.Module):
    def __init__(self, n_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted(width) for _ in range(n_blocks))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=shift)
        return x


def sequential(n_blocks: int = 16, width: int = 32) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Counted(width) for _ in range(n_blocks))), torch.randn(256, width)


def loop(n_blocks: int = 12, width: int = 32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Loop(n_blocks, width), (torch.randn(256, width), torch.randn(width))


MODELS = {"sequential": (sequential, "", 16), "loop": (loop, "blocks.", 12)}


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_run_as_often_as_the_nesting_says_and_gradients_stay(name: str) -> None:
    build, prefix, _ = MODELS[name]
    model, inputs = build(8, 8)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    kept = gradients(model, inputs)

    def part(first: int, end: int) -> tuple[str, ...]:
        return tuple(f"{prefix}{i}" for i in range(first, end))

    policy = Policy.recompute([part(0, 7), part(0, 4), part(4, 7), part(0, 2), f"{prefix}5"])
    counted = [module for module in model.modules() if isinstance(module, Counted)]
    for module in counted:
        module.n_calls = 0
    with apply_policy(model, policy):
        assert policy_of(model) == policy
        apply_policy(model, policy).undo()
        assert all(map(torch.equal, kept, gradients(model, inputs)))
    # Each level adds a run; a rerun ends where it enters the last unit inside.
    assert [module.n_calls for module in counted] == [4, 4, 3, 3, 2, 3, 2, 1]
    assert policy_of(model) == Policy() and all(map(torch.equal, kept, gradients(model, inputs)))


def nested(first: int, end: int, prefix: str, draw: random.Random, level: int = 0) -> list[tuple[str, ...]]:
    """Random segments of the blocks from `first` to before `end`, and segments inside them."""
    units, place = [], first
    while place < end:
        after = min(end, place + draw.randint(1, max(1, (end - first) // 2)))
        is_segment = after - place > 1 and (place, after) != (first, end)
        if is_segment and draw.random() < 0.8:
            units.append(tuple(f"{prefix}{i}" for i in range(place, after)))
            units += nested(place, after, prefix, draw, level + 1) if level < 3 else []
        elif level and draw.random() < 0.3:
            units.append((f"{prefix}{place}",))
            after = place + 1
        place = after
    return units


@pytest.mark.parametrize("name", MODELS)
def test_the_forecast_of_segments_inside_segments_holds(name: str) -> None:
    build, prefix, n_blocks = MODELS[name]
    model = ModelRef(target=f"{Path(__file__).resolve()}:{build.__name__}")
    graph, run = describe(model), measure(RunSpec(model=model, n_repeats=0, optimizer="sgd"))
    forecaster, n_nested = Forecaster(run, graph), 0
    for seed in range(4):
        policy = Policy.recompute(nested(0, n_blocks, prefix, random.Random(seed)))
        n_nested += len(policy.blocks) > len(set(policy.blocks))
        forecast, truth = forecaster.forecast(policy), measure(replace(run.spec, policy=policy))
        assert truth.failure is None, truth.failure
        assert forecast.step_peak_bytes == pytest.approx(truth.step_peak_bytes, rel=0, abs=256), policy.units
        assert round(forecast.flop_ratio * run.total_flops) == truth.total_flops, policy.units
    assert n_nested > 1, "flat policies prove nothing"


def test_segments_that_overlap_are_refused_by_the_run_and_by_the_forecast() -> None:
    model, _ = sequential(4, 8)
    policy = Policy.recompute([("0", "1", "2"), ("2", "3")])
    with pytest.raises(InvalidPolicy, match="'2' is named 2 times, by units that do not lie in each other"):
        apply_policy(model, policy)
    reference = ModelRef(target=f"{Path(__file__).resolve()}:sequential", arguments={"n_blocks": 4, "width": 8})
    forecaster = Forecaster(measure(RunSpec(model=reference, n_repeats=0)), describe(reference))
    assert forecaster.forecast(policy).step_peak_bytes is None
