"""What watches for second runs is seen by nobody; what it finds stands in test_hazards_shown.py, shown by real runs."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorer.engine.model.load import load
from explorer.engine.watch.observe import Observation
from explorer.engine.watch.second_run import SecondRun
from tests.engine import rerun_nets, tiny_nets
from tests.engine.graphs import graph_of
from tests.engine.walk_net import W, graph, having


def test_the_other_observer_sees_the_operators_of_the_model_alone() -> None:
    loaded = load(tiny_nets.ref("gpt"))

    def seen(*, watched: bool) -> tuple[int, list[tuple[int, int]]]:
        observation = Observation(loaded.model)
        torch.manual_seed(1)
        if watched:
            with SecondRun(loaded.model), observation:
                loaded.output()
        else:
            with observation:
                loaded.output()
        return observation.flow.now, [(each.signature, each.flops) for each in observation.seen.values()]

    assert seen(watched=True) == seen(watched=False)


def test_nothing_of_it_stays_on_the_model() -> None:
    loaded = load(rerun_nets.ref("drawing", source="python"))
    before = {fqn: dict(vars(module)) for fqn, module in loaded.model.named_modules()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in loaded.model.modules()]
    with SecondRun(loaded.model):
        loaded.output()
    assert {fqn: dict(vars(module)) for fqn, module in loaded.model.named_modules()} == before
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loaded.model.modules()] == hooks
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks


class Sequel(nn.Module):
    """Draws once from Python's generator and seeds it afterwards: no seed of its own, and yet it ends in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_a_block_that_goes_on_from_where_it_was_is_named_though_another_one_seeds() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.draws, self.seeds = Sequel(), rerun_nets.Seeded("python")

        def forward(self, x: Tensor) -> Tensor:
            return self.seeds(self.draws(x))

    described = graph_of(Both(), torch.ones(2, rerun_nets.WIDTH))
    assert "python_rng" in described.by_fqn["draws"].traits
    assert "python_rng" not in described.by_fqn["seeds"].traits


class Draws(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x))


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("trait", "how"),
    [
        ("uses_rng", lambda x: F.dropout(x, 0.5)),
        ("uses_rng", lambda x: x + torch.randn_like(x)),
        ("own_generator", lambda x: x + torch.randn(x.shape, generator=GENERATOR)),
        ("python_rng", lambda x: x * random.random()),
        ("numpy_rng", lambda x: x * float(numpy.random.rand())),
    ],
)
def test_random_sources_are_told_apart_and_reach_the_ancestors(trait: str, how: Callable[[Tensor], Tensor]) -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), nn.Sequential(Draws(how))))
    for other in ("uses_rng", "own_generator", "python_rng", "numpy_rng"):
        assert having(described, other) == (["", "1", "1.0"] if other == trait else [])
    assert described.by_fqn["1.0"].uses_rng
    assert not described.by_fqn["0"].uses_rng


@pytest.mark.parametrize("quiet", [nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=["p=0", "eval"])
def test_a_dropout_that_draws_nothing_has_no_trait(quiet: nn.Module) -> None:
    assert having(graph(nn.Sequential(nn.Linear(W, W), quiet)), "uses_rng") == []


def test_rrelu_at_the_end_of_a_block() -> None:
    assert having(graph(nn.Sequential(nn.Sequential(nn.Linear(W, W), nn.RReLU()), nn.Linear(W, W))), "rng_last") == [
        "0",
        "0.1",
    ]
