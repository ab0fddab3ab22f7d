"""Around each recompute: whether a block runs again, its running statistics, results that are saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer import is_recomputing
from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.check import _operators
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


def test_a_segment_goes_by_its_first_block() -> None:
    model = chain()
    with apply_policy(model, Policy.recompute([("1.0", "1.1")])):
        step(model)
    assert model[1][1].answers == [(False, None), (True, "1.0")]


def test_without_a_policy_nobody_is_told_anything() -> None:
    model = chain()
    seen: list[tuple[str, bool]] = []
    with observe_recompute(lambda *told: seen.append(told)):
        step(model)
    assert seen == []
    assert model[2].answers == [(False, None)]


def test_observers_see_start_and_end_also_when_early_stop_leaves_by_an_exception() -> None:
    model = chain()
    seen: list[tuple[str, bool]] = []
    with observe_recompute(lambda *told: seen.append(told)), apply_policy(model, Policy.recompute(["1", "1.0", "2"])):
        step(model)
    assert seen == [("2", True), ("2", False), ("1", True), ("1", False), ("1.0", True), ("1.0", False)]
    with apply_policy(model, Policy.recompute(["2"])):
        step(model)
    assert len(seen) == 6, "an observer that left is not told"


def test_the_answer_belongs_to_the_thread_that_recomputes() -> None:
    told: list[bool] = []
    with Recomputing((nn.Linear(2, 2),), "a"):
        other = threading.Thread(target=lambda: told.append(is_recomputing()))
        other.start()
        other.join()
        assert is_recomputing()
    assert told == [False]


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


def test_an_operator_by_its_full_name() -> None:
    assert operator("aten.mm.default") is torch.ops.aten.mm.default
    for unknown in ("aten.mm", "aten.no_such.default", "aten.mm.no_such"):
        with pytest.raises(AttributeError):
            operator(unknown)


def test_every_operator_that_is_offered_can_be_asked_for() -> None:
    names = [name for name in _operators() if name.startswith("aten.")]
    assert len(names) > 1000 and "aten.mm.default" in names
    assert all(str(operator(name)) == name for name in names[::50])


@pytest.mark.parametrize("save_ops", [(), (torch.ops.aten.mm.default,)])
def test_each_recompute_is_surrounded_and_saved_results_come_back(save_ops: tuple[object, ...]) -> None:
    entered: list[str] = []

    @contextmanager
    def again() -> Iterator[None]:
        entered.append("in")
        try:
            yield
        finally:  # early stop leaves by an exception
            entered.append("out")

    weight = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_()
    x = torch.ones(2, 3)
    expected = torch.autograd.grad((x @ weight).tanh().sin().sum(), weight)[0]
    result = checkpoint(
        lambda: (x @ weight).tanh().sin(), use_reentrant=False, context_fn=lambda: selective_contexts(save_ops, again)
    )
    assert torch.equal(torch.autograd.grad(result.sum(), weight)[0], expected)
    assert entered == ["in", "out"]
