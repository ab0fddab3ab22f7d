"""Settings of the process inside and after a context, and what an observer leaves as it was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.utils import deterministic

from explorer.engine.bench.other_tools import draw_autograd
from explorer.engine.model.describe import describe
from explorer.engine.model.loaded import Loaded
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import deterministic_kernels, tf32_kinds, without_tf32
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


def settings() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        cudnn.benchmark,
    )


@pytest.mark.parametrize("raising", [False, True])
def test_settings_come_back(raising: bool) -> None:
    before = settings()
    cudnn.benchmark = True
    try:
        with deterministic_kernels():
            assert settings() == (True, True, False, False)
            if raising:
                raise ValueError("inside")
    except ValueError:
        assert raising
    assert cudnn.benchmark
    cudnn.benchmark = before[3]
    assert settings() == before


def test_an_operator_without_a_deterministic_kernel_runs_without_a_word() -> None:
    with warnings.catch_warnings(record=True) as warned, deterministic_kernels():
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.warn("x.y does not have a deterministic implementation, but you set ...", stacklevel=1)
    assert warned == []


def test_strict_refuses_what_has_no_deterministic_kernel() -> None:
    """torch takes fused attention's deterministic backward on CUDA only where it may refuse other operators."""
    before = settings()
    with deterministic_kernels(strict=True):
        assert settings() == (True, False, False, False)
    assert settings() == before


CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_torch_starts() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True


def test_convolutions_may_use_it_by_default_and_products_may_not() -> None:
    assert tf32_kinds() == ("convolutions", "recurrent layers")


@pytest.mark.parametrize("matmul", ["highest", "high"])
@pytest.mark.parametrize("cudnn", [True, False])
def test_it_is_off_inside_and_as_it_was_afterwards(*, cudnn: bool, matmul: str) -> None:
    CUDNN.allow_tf32 = cudnn
    torch.set_float32_matmul_precision(matmul)
    before = tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32
    with pytest.raises(ValueError, match="in the step"), without_tf32():
        assert (tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32) == ((), False, False)
        raise ValueError("in the step")
    assert (tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32) == before


def test_a_choice_by_kind_survives() -> None:
    """torch refuses to read its old switch then."""
    CUDNN.allow_tf32 = False
    CUDNN.conv.fp32_precision = "tf32"
    with without_tf32():
        assert tf32_kinds() == ()
    assert tf32_kinds() == ("convolutions",)
