"""torch_remat itself: its replay is named before a run, and judged in one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import explorer
from explorer.plan.hazards.hazards import hazards
from explorer.plan.memory.reruns import self_checkpointing
from explorer.plan.predict.not_predicted import run_again_by_the_model
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


def test_a_kept_region_does_not_run_again() -> None:
    model = Net("kept")
    with explorer.record_step(model) as run:
        step(model)
    again = self_checkpointing(run.measurement)
    assert {"layers.0.norm", "layers.0.up", "layers.0.down"} <= set(again) and "layers.0.dropout" not in again


def test_a_policy_on_what_is_replayed_anyway_is_not_predicted() -> None:
    for block in ("layers.0", "layers.0.up"):
        assert "recomputes by itself" in run_again_by_the_model(Policy.recompute([block]), graph("replayed"))
