"""torch_remat itself: its replay is named before a run, and judged in one.

Its regions are blocks. What they hold is predicted, and what a policy on one would free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import explorer
from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.compare.compare import compare
from explorer.engine.model.describe import describe
from explorer.plan.hazards.hazards import hazards
from explorer.plan.predict.forecaster import Forecaster, prices
from explorer.plan.predict.not_predicted import not_predicted
from explorer.plan.why.caveats import self_checkpointing
from explorer.record import KEEP_ALL, Policy
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.run import RunSpec
from tests.engine.graphs import graph_of

remat = pytest.importorskip("torch_remat")

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
DRAWS = tuple(f"layers.{i}.dropout" for i in range(4))


class Layer(nn.Module):
    """`how`: plain, replayed, or replayed with its dropout in a region that is kept."""

    def __init__(self, name: str, how: str, rate: float) -> None:
        super().__init__()
        self.name, self.how = name, how
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(rate)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x)).relu()
        if self.how == "kept":
            hidden = remat.region(self.dropout, "dropout", recompute=False)(hidden)
            remat.recompute_needs_tensor(hidden)
        else:
            hidden = self.dropout(hidden)
        return x + self.down(hidden)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.body(x)
        return remat.checkpoint(region_name=self.name)(self.body)(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, how: str = "plain", rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(f"layers.{i}", how, rate) for i in range(4)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def step(model: nn.Module, batch: torch.Tensor = X) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def graph(how: str = "plain", rate: float = 0.1) -> ModelGraph:
    return graph_of(Net(how, rate), X)


def fired(of: ModelGraph, policy: Policy = KEEP_ALL) -> dict[str, tuple[str, ...]]:
    return {hazard.rule: hazard.blocks for hazard in hazards(of, policy, spec=RunSpec(model=ModelRef(target="net")))}


def test_the_replay_is_named_before_a_run_and_wrong_in_one() -> None:
    model, plain = Net("replayed"), Net()
    rules = fired(graph("replayed"))
    assert rules["replay-draws-again"] == DRAWS
    assert rules["checkpoints-itself"] == tuple(f"layers.{i}" for i in range(4))
    losses = []
    for net in (plain, model):
        torch.manual_seed(1)
        losses.append(step(net))
    assert torch.equal(*losses)
    pairs = list(zip(plain.parameters(), model.parameters()))
    distance = torch.stack([(a.grad - b.grad).square().sum() for a, b in pairs]).sum().sqrt()  # type: ignore[operator]
    norm = torch.stack([a.grad.square().sum() for a, _ in pairs]).sum().sqrt()  # type: ignore[union-attr]
    assert 0.1 < distance / norm < 1, "equal losses, and gradients of another forward"
    judged = explorer.judge(step, step, plain, X, candidate_model=model)
    assert judged.verdict == "different"


def test_what_draws_nothing_again_is_no_hazard_and_the_same_bit_by_bit() -> None:
    assert "replay-draws-again" not in fired(graph("kept"))
    for how, rate in (("kept", 0.1), ("replayed", 0.0)):
        assert explorer.judge(step, step, Net(rate=rate), X, candidate_model=Net(how, rate)).verdict == "bitwise equal"


def test_regions_are_blocks_and_a_kept_one_does_not_run_again() -> None:
    model = Net("kept")
    with explorer.record_step(model) as run:
        step(model)
    again = self_checkpointing(run.measurement)
    assert {"layers.0.norm", "layers.0.up", "layers.0.down"} <= set(again) and "layers.0.dropout" not in again


class Regions(Layer):
    """A layer that is replayed but for regions: a function, a module, inside a replayed one, twice, random."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.cos()).tanh()

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return remat.region(torch.exp, "last", recompute=True)(self.keep(self.mix, "mix", x))  # type: ignore[no-any-return]

    def keep(self, function: Callable[..., Any], name: str, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = remat.region(function, name, recompute=False)(x)
        remat.recompute_needs_tensor(kept)
        return kept

    def body(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.how == "function":
            hidden = self.keep(self.mix, "mix", hidden)
        elif self.how == "module":
            hidden = self.keep(self.dropout, "dropout", hidden)
        elif self.how == "nested":
            hidden = remat.region(self.outer, "outer", recompute=True)(hidden)
        elif self.how == "twice":
            for i in range(2):
                with remat.name_scope(f"pass.{i}"):
                    hidden = self.keep(self.mix, "mix", hidden)
        elif self.how == "random":
            hidden = self.keep(lambda x: F.dropout(x, 0.1), "drop", hidden)
        return x + self.down(hidden)  # type: ignore[no-any-return]


def regions(how: str) -> tuple[nn.Module, torch.Tensor]:
    net = Net(how)
    net.layers = nn.ModuleList([Regions(f"layers.{i}", how, 0.1) for i in range(2)])
    return net, X


MIX_BYTES = 3 * 16 * 64 * 4
"""A sine, a cosine and a tangent, of what the replay makes again."""
KEPT = {
    "function": ("mix_region", MIX_BYTES),  # the layer has a method of the region's name
    "module": ("dropout", 2 * 16 * 64 * 4),  # a mask, of the type of the numbers, and the result
    "nested": ("outer_region.mix", MIX_BYTES),
    "twice": ("pass_1_mix", MIX_BYTES),
    "random": ("drop", 2 * 16 * 64 * 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", KEPT)
def test_a_kept_region_is_a_block_whose_bytes_and_toggle_are_predicted_to_the_byte(how: str) -> None:
    name, n_bytes = KEPT[how]
    spec = RunSpec(model=ModelRef(target=f"{__file__}:regions", arguments={"how": how}), n_repeats=0)
    graph, real, played = describe(spec.model), measure(spec), measure_without_data(spec)
    of_regions = graph.with_trait("kept_region")
    assert {f"layers.{i}.{name}" for i in range(2)} <= set(of_regions) and len(of_regions) == 2 * (1 + (how == "twice"))
    assert played.step_peak_bytes == real.peaks.tracker_peak_bytes
    assert played.saved_after_forward_bytes == real.saved_after_forward_bytes
    block = f"layers.1.{name}"
    assert graph.by_fqn[block].saved_bytes == real.by_fqn[block].saved_after_forward_bytes == n_bytes
    assert (real.by_fqn[block].n_forward, real.by_fqn[block].n_recompute) == (1, 0)
    alone = measure_without_data(replace(spec, policy=Policy.recompute([block]))).step_peak_bytes
    (price,) = prices(real, [block], graph=graph)
    assert price.peak_change_bytes == (alone or 0) - (played.step_peak_bytes or 0), "without a generator's state"
    policy = Policy.recompute(f"layers.{i}.{name}" for i in range(2))
    forecast, toggled = Forecaster(real, graph).forecast(policy), measure(replace(spec, policy=policy))
    assert toggled.failure is None and toggled.by_fqn[block].n_recompute == 1
    assert forecast.step_peak_bytes == toggled.step_peak_bytes
    assert forecast.saved_after_forward_bytes == toggled.saved_after_forward_bytes != real.saved_after_forward_bytes
    if how == "random":
        assert compare(spec, replace(spec, policy=policy)).verdict == "bitwise equal"


def test_a_policy_on_what_is_replayed_anyway_is_not_predicted() -> None:
    graph = describe(ModelRef(target=f"{__file__}:regions", arguments={"how": "nested"}))
    for block in ("layers.0.up", "layers.0.outer_region", "layers.0.outer_region.last"):
        assert "replays" in not_predicted(Policy.recompute([block]), graph)
    assert not not_predicted(Policy.recompute(["layers.0", "layers.1.outer_region.mix"]), graph)
