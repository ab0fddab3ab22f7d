"""Around each recompute and while a unit waits: statistics, saved results, activations on the host."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from explorer import is_recomputing
from explorer.engine.policy import offload
from explorer.engine.policy.apply import _operators, apply_policy
from explorer.engine.policy.offload import HOST, Back, offload_saved, to_host
from explorer.engine.policy.units import Recomputing, observe_recompute, operator, selective_contexts
from explorer.record.policy import Policy

RUNNING: list[str] = []
"""Units that run again right now, the innermost last."""


class Asks(nn.Module):
    """Writes down what it is told whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.answers: list[tuple[bool, str | None]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append((is_recomputing(), RUNNING[-1] if RUNNING else None))
        return torch.tanh(self.linear(x)) * x


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Asks(), Asks()), Asks())


def step(model: nn.Module) -> None:
    with observe_recompute(lambda fqn, begins: RUNNING.append(fqn) if begins else RUNNING.remove(fqn)):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_can_ask_whether_it_runs_again(use_reentrant: bool) -> None:
    model = chain()
    with apply_policy(model, Policy.recompute(["1", "2"], use_reentrant=use_reentrant)):
        step(model)
    assert model[1][0].answers == [(False, None), (True, "1")]
    assert model[2].answers == [(False, None), (True, "2")]
    assert not is_recomputing()
    assert not RUNNING


def test_below_an_ancestor_that_runs_again_the_innermost_unit_is_named() -> None:
    model = chain()
    with apply_policy(model, Policy.recompute(["1", "1.1"], early_stop=False)):
        step(model)
    assert model[1][0].answers == [(False, None), (True, "1")]
    assert model[1][1].answers == [(False, None), (True, "1"), (True, "1.1")]


def test_observers_see_start_and_end_also_when_early_stop_leaves_by_an_exception() -> None:
    model = chain()
    seen: list[tuple[str, bool]] = []
    with observe_recompute(lambda *told: seen.append(told)), apply_policy(model, Policy.recompute(["1", "1.0", "2"])):
        step(model)
    assert seen == [("2", True), ("2", False), ("1", True), ("1", False), ("1.0", True), ("1.0", False)]
    with apply_policy(model, Policy.recompute(["2"])):
        step(model)
    assert len(seen) == 6, "an observer that left is not told"


def test_a_backward_in_another_thread_is_seen_there() -> None:
    model = chain()
    told = observe_recompute(lambda fqn, begins: RUNNING.append(fqn) if begins else RUNNING.remove(fqn))
    with apply_policy(model, Policy.recompute(["2"])), told:
        loss = model(torch.randn(3, 4)).sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
    assert model[2].answers == [(False, None), (True, "2")]


def test_it_ends_when_the_block_raises() -> None:
    with pytest.raises(ValueError, match="inside"), Recomputing((nn.Linear(2, 2),)):
        raise ValueError("inside")
    assert not is_recomputing()


NORMS = [
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm1d(4, momentum=None),
    lambda: nn.BatchNorm1d(4, affine=False),
    lambda: nn.InstanceNorm1d(4, track_running_stats=True),
]


@pytest.mark.parametrize("norm", NORMS, ids=["batch", "cumulative", "not affine", "instance"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_running_statistics_move_once_a_step(norm: object, use_reentrant: bool) -> None:
    def trained(policy: Policy) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Sequential(norm(), nn.Conv1d(4, 4, 1)))  # type: ignore[operator]
        with apply_policy(model, policy):
            for _ in range(3):
                model(torch.randn(5, 4, 6)).square().sum().backward()
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    bare = trained(Policy())
    once = trained(Policy.recompute(["1"], use_reentrant=use_reentrant))
    twice = trained(Policy.recompute(["1"], use_reentrant=use_reentrant, running_stats="every_forward"))
    assert bare.keys() == once.keys() and bare
    assert all(torch.equal(bare[name], once[name]) for name in bare)
    assert not torch.equal(twice["1.0.running_mean"], bare["1.0.running_mean"])


def test_a_norm_used_outside_its_unit_too_is_exact() -> None:
    def trained(policy: Policy) -> list[Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm, nn.Linear(4, 4)), norm)
        with apply_policy(model, policy):
            model(torch.randn(5, 4)).square().sum().backward()
        return [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(trained(Policy()), trained(Policy.recompute(["1"])), strict=True))


def test_the_very_buffers_come_back() -> None:
    norm = nn.BatchNorm1d(4)
    before = dict(norm._buffers)
    again = Recomputing((norm,))
    with again, again:
        norm(torch.randn(3, 4))
    assert all(norm._buffers[name] is before[name] for name in before)
    assert norm.num_batches_tracked == 0


def test_an_operator_is_found_by_its_full_name_alone() -> None:
    names = [name for name in _operators() if name.startswith("aten.")]
    assert len(names) > 1000 and "aten.mm.default" in names
    assert all(str(operator(name)) == name for name in ("aten.mm.default", *names[::50]))
    for unknown in ("aten.mm", "aten.no_such.default", "aten.mm.no_such"):
        with pytest.raises(AttributeError):
            operator(unknown)


class Products(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("save_ops", [(), (torch.ops.aten.mm.default,)])
def test_each_recompute_is_surrounded_and_saved_results_come_back(save_ops: tuple[object, ...]) -> None:
    entered: list[str] = []

    @contextmanager
    def again(inside: AbstractContextManager[object] | None = None) -> Iterator[None]:
        entered.append("in")
        try:
            with inside or nullcontext():
                yield
        finally:  # early stop leaves by an exception
            entered.append("out")

    weight = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_()
    x = torch.ones(2, 3)
    expected = torch.autograd.grad((x @ weight).tanh().sin().sum(), weight)[0]
    result = checkpoint(
        lambda: (x @ weight).tanh().sin(), use_reentrant=False, context_fn=lambda: selective_contexts(save_ops, again)
    )
    with Products() as products:
        assert torch.equal(torch.autograd.grad(result.sum(), weight)[0], expected)
    assert entered == ["in", "out"]
    assert products.n == (1 if save_ops else 2), "the gradient's, and that of the recompute unless it was saved"


class Lane:
    """Copies as a GPU's stream would, at once, and counts the ways."""

    def __init__(self) -> None:
        self.out_bytes: list[int] = []
        self.n_back = 0

    def __call__(self, tensor: Tensor) -> Back:
        self.out_bytes.append(tensor.nbytes)
        kept = tensor.detach().clone()

        def back() -> Tensor:
            self.n_back += 1
            return kept.clone()

        return back


def gradients(model: nn.Module, x: Tensor, lane: Lane | None) -> list[Tensor]:
    model.zero_grad()
    with offload_saved([model], lane):
        loss = model(x).square().sum()
    gc.collect()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_backward_gets_what_was_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(6)))
    x, lane = torch.randn(8, 16), Lane()
    kept = gradients(model, x, None)
    assert all(torch.equal(one, other) for one, other in zip(kept, gradients(model, x, lane), strict=True))
    assert lane.out_bytes and lane.n_back >= len(lane.out_bytes)


def test_what_stays_is_free_once_nobody_uses_it() -> None:
    """An output that its own operation saves, and no backward: what a unit around it made again, for instance."""
    x = torch.randn(4, requires_grad=True)
    with offload_saved([]):
        gone = weakref.ref(x.exp())
    assert gone() is None


def test_a_tensor_that_several_save_crosses_once() -> None:
    lane, x = Lane(), torch.randn(32, 32, requires_grad=True)
    with offload_saved([], lane):
        y = x.exp()
        loss = (y * y).sum() + y.square().sum() + y.sin().sum()
    assert lane.out_bytes == [y.nbytes]
    loss.backward()
    assert x.grad is not None and torch.allclose(x.grad, (4 * y + y.cos()) * y)


def test_an_address_that_is_handed_out_again_is_another_tensor() -> None:
    """The copy outlives the tensor: the next one at its address has to cross too."""
    lane, x = Lane(), torch.ones(1000, requires_grad=True)
    with offload_saved([], lane):
        total = torch.zeros(())
        for i in range(20):
            total = total + ((x * float(i)).detach() * x).sum()
    total.backward()
    assert x.grad is not None and x.grad.tolist() == [sum(range(20))] * 1000


def test_what_is_expanded_crosses_unexpanded() -> None:
    lane, x = Lane(), torch.randn(4, 1, requires_grad=True)
    wide, other = x.detach().expand(4, 1000), torch.randn(4, 1000, requires_grad=True)
    with offload_saved([], lane):
        loss = (wide * other).sum()
    assert lane.out_bytes == [x.nbytes]
    loss.backward()
    assert other.grad is not None and torch.equal(other.grad, wide)


def test_parameters_stay_and_the_cpu_moves_nothing() -> None:
    model, lane = nn.Linear(8, 8, bias=False), Lane()
    with offload_saved([model], lane):
        model(torch.randn(2, 8, requires_grad=True)).sum()
    assert model.weight.nbytes not in lane.out_bytes
    assert to_host(torch.ones(3)) is None


def test_bytes_on_the_host_are_counted_until_nobody_holds_them() -> None:
    HOST.restart()
    before, x = HOST.peak_bytes, torch.randn(256, requires_grad=True)
    with offload_saved([], Lane()):
        loss = x.exp().sum()
    assert HOST.peak_bytes - before == 1024
    HOST.restart()
    assert HOST.peak_bytes - before == 1024, "it is still there"
    loss.backward()
    del loss
    gc.collect()
    HOST.restart()
    assert HOST.peak_bytes == before


@pytest.mark.parametrize("n_times", [1, 3])
def test_what_is_there_is_not_brought_again(n_times: int) -> None:
    lane, x = Lane(), torch.randn(16, requires_grad=True)
    with offload_saved([], lane):
        y = x.exp()
        loss = (y * y).sum()
    for _ in range(n_times):
        loss.backward(retain_graph=True)
    assert lane.n_back <= 2 * n_times  # once for the product, once for the exponential


def grown(x: Tensor, weight: nn.Parameter) -> Tensor:
    y = (x * weight).sigmoid()
    y.add_(1.0)
    return y


def retrained(x: Tensor, weight: nn.Parameter) -> Tensor:
    y = (x * weight).sum()
    with torch.no_grad():
        weight.mul_(2.0)
    return y


@pytest.mark.parametrize("step", [grown, retrained])
@pytest.mark.parametrize("moves", [False, True])
def test_what_is_written_in_place_after_it_was_saved_is_an_error_as_without_offload(
    step: Callable[[Tensor, nn.Parameter], Tensor], moves: bool
) -> None:
    x, weight = torch.ones(4, requires_grad=True), nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(x, weight).sum().backward()
    with offload_saved([], Lane() if moves else None):
        loss = step(x, weight).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*at version \d; expected version"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_tensors_whose_bytes_lie_in_others_stay(kind: str) -> None:
    matrix, x, lane = getattr(torch.eye(3), kind)(), torch.randn(3, 3, requires_grad=True), Lane()
    with offload_saved([], lane):
        loss = (matrix @ x.exp()).sum()
    loss.backward()
    assert x.grad is not None and torch.allclose(x.grad, x.exp()) and lane.out_bytes == [x.nbytes]


def test_a_tensor_its_conjugate_and_its_negative_share_bytes_on_the_host() -> None:
    x, lane = torch.randn(4, dtype=torch.complex64, requires_grad=True), Lane()
    for out in (None, lane):
        with offload_saved([], out):
            y = x * 1j
            (y.square() * y.conj().square()).real.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * 4 * x.detach().abs().square() * x.detach())
    assert lane.out_bytes == [y.nbytes] * 3, "y and both squares"
    lane.out_bytes.clear()
    with offload_saved([], lane):
        (y.imag.sin() * y.conj().imag.sin()).sum()
    assert lane.out_bytes == [y.nbytes // 2] * 3


def test_a_weight_of_another_module_stays_too() -> None:
    weight, x, lane = nn.Parameter(torch.randn(3, 3)), torch.randn(5, 3, requires_grad=True), Lane()
    with offload_saved([], lane):
        _ = x @ weight, x @ weight.t()
    assert lane.out_bytes == [x.nbytes]


def test_a_block_that_calls_torch_func_is_named() -> None:
    named = r"blocks\.1 is offloaded and calls torch\.func.*Keep the block"
    with pytest.raises(RuntimeError, match=named), offload_saved([], name="blocks.1"):
        torch.func.grad(torch.sum)(torch.ones(3))
    with pytest.raises(RuntimeError, match="^the user's own$"), offload_saved([]):
        raise RuntimeError("the user's own")


def test_the_bytes_on_the_host_may_be_counted_inside_a_count() -> None:
    """A garbage collection may end an owner at any line of the same thread."""
    with HOST._lock:
        assert HOST._lock.acquire(blocking=False)
        HOST._lock.release()


def test_each_stream_brings_a_copy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would make the second wait for the copy of the first."""
    lane, x = Lane(), torch.randn(16, requires_grad=True)
    with offload_saved([], lane):
        loss = (y := x.exp()).mul(y).sum()
    for streams, n_back in ((itertools.repeat(1), 1), (itertools.count(), 2)):
        lane.n_back = 0
        monkeypatch.setattr(offload, "_stream", lambda device, streams=streams: next(streams))
        torch.autograd.grad(loss, y, retain_graph=True)
        assert lane.n_back == n_back


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_argument_that_is_given_twice_is_one_tensor_at_the_recompute_too(use_reentrant: bool) -> None:
    """Else nn.MultiheadAttention inside a unit takes other products for query, key and value, and torch raises."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen: list[tuple[bool, ...]] = []

        def forward(self, x: Tensor, y: Tensor, other: Tensor, *, last: Tensor) -> Tensor:
            self.seen.append((x is y, x is last, x is other, other is y))
            return torch.tanh(self.linear(x)) * y + other - last

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Same()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, 2 * x, last=x)

    model = nn.Sequential(nn.Linear(4, 4), Outer(), nn.Linear(4, 4))
    x = torch.randn(3, 4)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    model[1].inner.seen.clear()
    with apply_policy(model, Policy.recompute(["1", "1.inner"], use_reentrant=use_reentrant)):
        again = gradients()
    assert all(torch.equal(left, right) for left, right in zip(plain, again, strict=True))
    assert len(model[1].inner.seen) >= 2 and set(model[1].inner.seen) == {(True, True, False, False)}


def test_layers_of_an_encoder_recompute_with_their_attention_inside() -> None:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(2))
    model = nn.Sequential(nn.Linear(8, 8), *layers)
    x = torch.randn(3, 5, 8)
    model(x).square().sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with apply_policy(model, Policy.recompute(["1", "1.self_attn", "2"])):
        model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)
