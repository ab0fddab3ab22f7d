"""Who only looks leaves everything as it was: one test an item of the world."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.bench.other_tools import draw_autograd
from explorer.engine.model.describe import describe
from explorer.engine.model.loaded import Loaded
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.rng import RngState
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine.graphs import graph_of_loaded

TINY = ModelRef(target="sample_models/gpt.py", arguments={"n_layers": 1, "width": 8, "length": 4, "batch": 2})


class Restless(nn.Module):
    """Moves everything a forward can move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(3)
        self.n_calls = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        self.mean += x.detach().mean(0)
        noise = torch.rand(x.shape, generator=self.generator) + float(numpy.random.rand()) + random.random()
        return torch.dropout(self.linear(self.frozen(self.norm(x))) * noise, 0.5, train=True)


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    torch.manual_seed(0)
    model = Restless()
    model(torch.randn(3, 4)).sum().backward()
    yield Loaded(TINY, model, torch.randn(3, 4), None, None)


def look(loaded: Loaded) -> None:
    graph_of_loaded(loaded)


def modes(loaded: Loaded) -> object:
    return [module.training for module in loaded.model.modules()]


def tensors(loaded: Loaded) -> object:
    return [(id(t), t._version, t.tolist()) for t in (*loaded.model.parameters(), *loaded.model.buffers())]


def gradients(loaded: Loaded) -> object:
    return [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in loaded.model.parameters()]


def generators(loaded: Loaded) -> object:
    return RngState.capture(loaded.model).positions()


def hooks(loaded: Loaded) -> object:
    return [
        [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]
        for module in loaded.model.modules()
    ]


def attributes(loaded: Loaded) -> object:
    plain = (bool, int, float, str, type(None))
    return [{k: v if isinstance(v, plain) else id(v) for k, v in vars(m).items()} for m in loaded.model.modules()]


def batch(loaded: Loaded) -> object:
    return loaded.inputs.tolist(), loaded.inputs.requires_grad, loaded.inputs._version


ITEMS = [modes, tensors, gradients, generators, hooks, attributes, batch]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.__name__)
def test_describing_leaves(loaded: Loaded, item: Callable[[Loaded], object]) -> None:
    before = item(loaded)
    look(loaded)
    assert item(loaded) == before


@pytest.mark.parametrize("item", [tensors, generators, attributes], ids=lambda item: item.__name__)
def test_the_check_can_fail(loaded: Loaded, item: Callable[[Loaded], object]) -> None:
    before = item(loaded)
    loaded.output()
    assert item(loaded) != before


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.__name__)
def test_a_policy_put_on_and_taken_off_leaves(loaded: Loaded, item: Callable[[Loaded], object]) -> None:
    before = item(loaded)
    apply_policy(loaded.model, Policy.recompute(["norm", "linear"], restore_rng=("generator", "python"))).undo()
    assert item(loaded) == before


@pytest.mark.parametrize(
    "verb", [lambda: describe(TINY), lambda: draw_autograd(RunSpec(model=TINY), "blocks.0")], ids=["describe", "draw"]
)
def test_the_process_draws_on_as_if_nothing_had_been(verb: Callable[[], object]) -> None:
    before = RngState.capture().positions()
    grad = torch.is_grad_enabled()
    verb()
    assert RngState.capture().positions() == before
    assert torch.is_grad_enabled() == grad
    assert torch.get_default_dtype() == torch.float32
