"""Traits from one forward, and that its watch is transparent; test_hazards_shown.py shows the traits by real runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from explorer.engine.model.load import load
from explorer.engine.watch.block_facts import BlockNotes
from explorer.engine.watch.forward import ForwardWatch
from explorer.engine.watch.rerun_traits import ArgumentsAndState, RandomNumbers, SelfCheckpointing
from tests.engine import rerun_nets, tiny_nets
from tests.engine.graphs import W, Walk, graph, graph_of, having


def hook_counts(model: nn.Module) -> list[int]:
    counts = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    every = torch.nn.modules.module
    return [*counts, len(every._global_forward_hooks), len(every._global_forward_pre_hooks)]


def test_notes_do_not_see_the_operators_of_other_notes() -> None:
    loaded = load(tiny_nets.ref("gpt"))

    def operators(*others: Any) -> tuple[int, list[tuple[int, int]]]:
        notes = BlockNotes(loaded.model)
        torch.manual_seed(1)
        with ForwardWatch(loaded.model, [notes, *others]):
            loaded.output()
        return notes.flow.now, [(each.signature, each.flops) for each in notes.facts.values()]

    assert operators(RandomNumbers(loaded.model), ArgumentsAndState(loaded.model)) == operators()


class Sequel(nn.Module):
    """Draws once from Python's generator and seeds it afterwards: no seed of its own, and yet it ends in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_a_block_that_continues_a_stream_is_named_though_another_one_seeds() -> None:
    described = graph_of(nn.Sequential(Sequel(), rerun_nets.Seeded("python")), torch.ones(2, rerun_nets.WIDTH))
    assert "python_rng" in described.by_fqn["0"].traits
    assert "python_rng" not in described.by_fqn["1"].traits


class Draws(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x))


GENERATOR = torch.Generator()


@pytest.mark.parametrize(("trait", "how"), [
    ("uses_rng", lambda x: F.dropout(x, 0.5)),
    ("uses_rng", lambda x: x + torch.randn_like(x)),
    ("own_generator", lambda x: x + torch.randn(x.shape, generator=GENERATOR)),
    ("python_rng", lambda x: x * random.random()),
    ("numpy_rng", lambda x: x * float(numpy.random.rand())),
])  # fmt: skip
def test_random_sources_are_distinct_texts_and_reach_the_ancestors(trait: str, how: Callable[[Tensor], Tensor]) -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), nn.Sequential(Draws(how))))
    for other in ("uses_rng", "own_generator", "python_rng", "numpy_rng"):
        assert having(described, other) == (["", "1", "1.0"] if other == trait else [])
    assert described.by_fqn["1.0"].uses_rng and not described.by_fqn["0"].uses_rng


@pytest.mark.parametrize("quiet", [nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=["p=0", "eval"])
def test_a_dropout_that_draws_nothing_has_no_trait(quiet: nn.Module) -> None:
    assert having(graph(nn.Sequential(nn.Linear(W, W), quiet)), "uses_rng") == []


def test_rrelu_at_the_end_of_a_block() -> None:
    described = graph(nn.Sequential(nn.Sequential(nn.Linear(W, W), nn.RReLU()), nn.Linear(W, W)))
    assert having(described, "rng_last") == ["0", "0.1"]


class Renorm(nn.BatchNorm1d):
    """Normalises with its running mean and moves it afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.running_mean
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return result


class Still(nn.BatchNorm1d):
    """Reads and does not move."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.running_mean


class Aside(nn.BatchNorm1d):
    """Moves them, and what it makes of them meets no value that wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.running_mean * 2
        return super().forward(x)


@pytest.mark.parametrize(("norm", "used"), [(nn.BatchNorm1d, False), (Renorm, True), (Still, False), (Aside, False)])
def test_use_of_statistics_is_reading_and_moving(norm: Any, used: bool) -> None:
    described = graph_of(nn.Sequential(nn.Linear(3, 3), norm(3)), torch.randn(4, 3))
    assert ("reads_statistics" in described.by_fqn["1"].traits) == used


class Whole(nn.Module):
    """Its own forward in a Function of its own, as guided-diffusion's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(self.inner, x)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.whole = Whole()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        return self.whole(self.layers[2](x))


@pytest.mark.parametrize(("shape", "blocks"), [((1, 2), ("layers.1", "whole")), ((1, 3), ())])
def test_the_outermost_blocks_that_a_model_runs_again(shape: tuple[int, int], blocks: tuple[str, ...]) -> None:
    """A forward that raises leaves no hook either."""
    model, notes = Checkpointing(), SelfCheckpointing()
    try:
        with ForwardWatch(model, [notes]):
            model(torch.ones(shape))
    except RuntimeError:
        assert shape == (1, 3)
    assert notes.blocks == blocks and not any(hook_counts(model))


def test_a_block_that_writes_into_its_input() -> None:
    inner = nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True))
    assert having(graph(nn.Sequential(inner, nn.Linear(W, W))), "changes_inputs") == ["0.1"]


class Speaks(nn.Module):
    """Takes its tensor by name and answers in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, *, hidden: Tensor, cache: object = None) -> dict[str, Tensor]:
        return {"hidden": self.linear(hidden)}


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.speaks = Speaks()

    def forward(self, x: Tensor) -> Tensor:
        return self.speaks(hidden=x * 1.0, cache=[])["hidden"]


def test_ways_of_calling_that_checkpointing_cares_for() -> None:
    described = graph(Asks())
    assert having(described, "keyword_inputs") == having(described, "nested_outputs") == ["speaks"]
    assert having(described, "keeps_cache") == []  # handed one, and leaves it alone
    assert having(graph(Walk(1)), "inputs_need_no_grad") == ["", "stem"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("mean", torch.zeros(W))
        self.n_calls = 0
        self.width = W

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  # type: ignore[operator]
        return self.linear(x) - self.mean


def test_state_that_forward_moves() -> None:
    described = graph(
        nn.Sequential(nn.BatchNorm1d(W), nn.Sequential(Counts()), nn.BatchNorm1d(W, track_running_stats=False))
    )
    assert having(described, "running_statistics") == ["", "0"]
    assert having(described, "moves_buffers") == having(described, "moves_attributes") == ["", "1", "1.0"]


class Box:
    skip: Tensor | None = None


def closed() -> tuple[Callable[[Any, Tensor], None], Callable[[Any, Tensor], Tensor]]:
    """Functions that put a tensor in a list of theirs, and take it out."""
    held: list[Tensor] = []
    return lambda _, x: held.append(x), lambda _, x: held.pop()


STORE: dict[str, Tensor] = {}
LOCAL = threading.local()
PUT, POP = closed()


def take(box: Box) -> Tensor | None:
    skip, box.skip = box.skip, None
    return skip


class Sharing(nn.Module):
    """Calls `how` with the shared object and its input."""

    def __init__(self, shared: Any, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.shared, self.how = shared, how

    def forward(self, x: Tensor) -> Tensor:
        result = self.how(self.shared, x)
        return torch.tanh(x) if result is None else torch.tanh(x) * result


@pytest.mark.parametrize(
    ("shared", "put", "pop"),
    [
        ({}, lambda store, x: store.update(skip=x), lambda store, x: store.pop("skip")),
        (None, lambda _, x: STORE.update(skip=x), lambda _, x: STORE.pop("skip")),
        ([torch.ones(W)], lambda store, x: store.append(x), lambda store, x: store.pop(0)),
        (Box(), lambda box, x: setattr(box, "skip", x), lambda box, x: take(box)),
        (None, *closed()),
        (None, lambda _, x: PUT(None, x), lambda _, x: POP(None, x)),
        (None, lambda _, x: setattr(LOCAL, "skip", x), lambda _, x: vars(LOCAL).pop("skip")),
    ],
    ids=[
        "dictionary",
        "a global",
        "first in first out",
        "an attribute",
        "closures",
        "closures of a file",
        "a thread's",
    ],
)
def test_blocks_that_share_an_object_are_named_by_what_they_leave(shared: Any, put: Any, pop: Any) -> None:
    nets = [
        nn.Sequential(Sharing(shared, put), nn.Linear(W, W)),
        Sharing(shared, pop),
        Sharing(shared, lambda *_: None),
    ]
    described = graph_of(nn.Sequential(nn.Sequential(*nets)), torch.ones(2, W)).by_fqn
    assert {fqn for fqn, block in described.items() if "takes_stored" in block.traits} >= {"0.1"}
    assert not {"0.0", "0.0.0", "0.2"} & {fqn for fqn, block in described.items() if "takes_stored" in block.traits}
    if not isinstance(shared, list):  # there the first tensor was stored before the forward
        assert {fqn for fqn, block in described.items() if "stores_tensors" in block.traits} == {"0.0", "0.0.0"}
        assert "takes_stored" not in described["0"].traits, "it holds both"
