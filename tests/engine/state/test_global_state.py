"""Generators and settings of the process: read, restored, and left as they were by an observer."""

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
from explorer.engine.state.rng import RngState, seed_everything, set_state
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


def state(loaded: Loaded) -> dict[str, object]:
    """What a look at a model must leave as it was."""
    plain = (bool, int, float, str, type(None))
    modules = list(loaded.model.modules())
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    return {
        "modes": [module.training for module in modules],
        "tensors": [(id(t), t._version, t.tolist()) for t in tensors],
        "gradients": [(id(t.grad), None if t.grad is None else t.grad.tolist()) for t in loaded.model.parameters()],
        "generators": RngState.capture(loaded.model).positions(),
        "hooks": [[len(v) for name, v in sorted(vars(m).items()) if name.endswith("_hooks")] for m in modules],
        "attributes": [{k: v if isinstance(v, plain) else id(v) for k, v in vars(m).items()} for m in modules],
        "batch": (loaded.inputs.tolist(), loaded.inputs.requires_grad, loaded.inputs._version),
    }


def take_a_policy_on_and_off(loaded: Loaded) -> None:
    apply_policy(loaded.model, Policy.recompute(["norm", "linear"], restore_rng=("generator", "python"))).undo()


@pytest.mark.parametrize("look", [graph_of_loaded, take_a_policy_on_and_off])
def test_a_look_leaves_everything(loaded: Loaded, look: Callable[[Loaded], object]) -> None:
    before = state(loaded)
    look(loaded)
    assert state(loaded) == before


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


@pytest.mark.parametrize("strict", [False, True])
def test_settings_come_back_after_an_exception(strict: bool) -> None:
    """torch takes fused attention's deterministic backward on CUDA only where it may refuse other operators."""
    before = settings()
    cudnn.benchmark = True
    with pytest.raises(ValueError), deterministic_kernels(strict=strict):
        assert settings() == (True, not strict, False, False)
        raise ValueError
    assert settings() == (*before[:3], True)
    cudnn.benchmark = before[3]


def test_an_operator_without_a_deterministic_kernel_runs_without_a_word() -> None:
    with warnings.catch_warnings(record=True) as warned, deterministic_kernels():
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.warn("x.y does not have a deterministic implementation, but you set ...", stacklevel=1)
    assert warned == []


CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_torch_starts() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True


def test_convolutions_may_use_tf32_by_default_and_products_may_not() -> None:
    assert tf32_kinds() == ("convolutions", "recurrent layers")


@pytest.mark.parametrize("matmul", ["highest", "high"])
@pytest.mark.parametrize("cudnn", [True, False])
def test_tf32_is_off_inside_and_as_before_afterwards(*, cudnn: bool, matmul: str) -> None:
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


def draws(net: Restless) -> dict[str, float]:
    return {
        "torch cpu": torch.rand(1).item(),
        "python": random.random(),
        "numpy": numpy.random.rand(),
        "generator": torch.rand(1, generator=net.generator).item(),
    }


def test_restore_repeats_every_draw() -> None:
    net = Restless()
    state = RngState.capture(net)
    first = draws(net)
    assert draws(net) != first
    state.restore()
    assert draws(net) == first


@pytest.mark.parametrize("source", ["torch cpu", "python", "numpy", "generator"])
def test_positions_tell_which_generator_moved(source: str) -> None:
    net = Restless()
    before = RngState.capture(net).positions()
    kept = RngState.capture(net)
    draws(net)
    moved = RngState.capture(net).states[source]
    kept.restore()
    set_state(net.generator if source == "generator" else source, moved)
    after = RngState.capture(net).positions()
    assert {name for name in before if before[name] != after[name]} == {source}


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**63 - 1])
def test_a_seed_decides_everything(seed: int) -> None:
    net = Restless()
    seed_everything(seed)
    first = RngState.capture().positions()
    draws(net)
    seed_everything(seed)
    assert RngState.capture().positions() == first


@pytest.mark.parametrize("change", [deterministic_kernels, without_tf32])
def test_switches_change_where_torch_forbids_it(change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports torch's test suite calls `torch.backends.disable_global_flags()`, and judges all the same."""
    backends: Any = torch.backends
    before = cudnn.benchmark, cudnn.allow_tf32
    with monkeypatch.context() as patched:
        patched.setattr(backends.m, "__allow_nonbracketed_mutation_flag", False)
        with change():
            assert not (cudnn.benchmark if change is deterministic_kernels else cudnn.allow_tf32)
        assert (cudnn.benchmark, cudnn.allow_tf32) == before and backends.flags_frozen()
