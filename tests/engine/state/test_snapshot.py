"""What a run moves comes back bit by bit, in the objects that stood there."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot, SharedSnapshot, StepSnapshot, optimizers_of


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.seen = [1]
    model(torch.ones(3, 2)).sum().backward()
    return model, torch.arange(6.0).reshape(3, 2)


def step(model: nn.Sequential, batch: torch.Tensor) -> None:
    model(batch.to(model[0].weight.dtype)).square().sum().backward()
    model.seen.append(2)
    model.new = 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def test_each_run_starts_from_the_snapshot_and_the_model_is_as_before() -> None:
    model, batch = model_and_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors, seen = [id(p) for p in (*model.parameters(), *model.buffers())], model.seen
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    position = torch.get_rng_state()
    after = []
    with ModelSnapshot(model, list(model.modules())) as snapshot:
        for _ in range(2):
            snapshot.restore()
            assert all(p.grad is None for p in model.parameters()) and model.seen == [1] and model.seen is not seen
            step(model, batch)
            after.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(after[0][name], after[1][name]) for name in before)
    assert not torch.equal(after[0]["0.weight"], before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p) for p in (*model.parameters(), *model.buffers())] == tensors
    assert all(p.grad is grad and torch.equal(p.grad, was) for p, (grad, was) in zip(model.parameters(), gradients))
    assert model.seen is seen and seen == [1] and not hasattr(model, "new")
    assert torch.equal(torch.get_rng_state(), position)


def test_a_run_in_float64_leaves_the_types_as_before() -> None:
    model, batch = model_and_batch()
    with ModelSnapshot(model, list(model.modules())) as snapshot:
        snapshot.restore(torch.float64)
        step(model, batch)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model[1].num_batches_tracked.dtype is torch.int64
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_memory_that_parameters_share_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat parameters; two storages that were freed have one address, and each is freed again."""
    flat = torch.arange(400.0)
    model = nn.Module()
    model.views = nn.ParameterList([nn.Parameter(part) for part in flat.split(4)])
    model.freed = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
    for parameter in model.freed:
        parameter.untyped_storage().resize_(0)
    copied: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda one: copied.append(one.nbytes()) or clone(one))
    with ModelSnapshot(model, [model]):
        assert sorted(copied) == [0, 0, flat.nbytes]
        flat.zero_()
        for parameter in model.freed:
            parameter.untyped_storage().resize_(12)
    assert torch.equal(torch.cat(list(model.views)), torch.arange(400.0))
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.freed)


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    model, _ = model_and_batch()
    before = model[0].weight.clone()
    with pytest.raises(ValueError), ModelSnapshot(model, list(model.modules())) as snapshot:
        snapshot.restore()
        model[0].weight.data.zero_()
        raise ValueError
    assert torch.equal(model[0].weight, before)


def test_an_optimizer_steps_with_a_copy_of_its_state() -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    held = optimizer.state[model[0].weight]
    moment = held["exp_avg"].clone()
    snapshot = OptimizerSnapshot(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    snapshot.restore()
    now = optimizer.state[model[0].weight]
    assert now is not held and torch.equal(now["exp_avg"], moment) and optimizer.param_groups[0]["lr"] == 0.1
    snapshot.close()
    assert optimizer.state[model[0].weight] is held and torch.equal(held["exp_avg"], moment)


def test_moments_take_the_type_of_a_wider_parameter() -> None:
    model, _ = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    model.zero_grad()
    model[0].weight.data = model[0].weight.data.double()
    OptimizerSnapshot(optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float64
    assert optimizer.state[model[0].weight]["step"].dtype is torch.float32  # one number: Adam's own type


N_STEPS = 0


class Logs:
    def __init__(self) -> None:
        self.losses: list[float] = []


def test_what_a_closure_reaches_comes_back_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    logs, recent, seen, settings = Logs(), deque([1]), {1}, SimpleNamespace(n=1)
    count = 0

    def step() -> None:
        nonlocal count
        global N_STEPS
        count += 1
        N_STEPS += 1
        loss = model(torch.rand(1, 2)).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        logs.losses.append(loss.item())
        recent.append(2)
        seen.add(2)
        settings.n += 1

    step()
    weight, gradient = model.weight.clone(), model.weight.grad.clone()
    moment = optimizer.state[model.weight]["momentum_buffer"]
    momentum, rate, losses, position = moment.clone(), schedule.get_last_lr(), logs.losses, torch.get_rng_state()
    snapshot = StepSnapshot(model, step)
    for _ in range(2):
        step()
        snapshot.restore()
        assert torch.equal(model.weight, weight) and torch.equal(model.weight.grad, gradient)
        assert optimizer.state[model.weight]["momentum_buffer"] is moment and torch.equal(moment, momentum)
        assert schedule.get_last_lr() == rate and torch.equal(torch.get_rng_state(), position)
        assert logs.losses is losses and len(losses) == 1
        assert (list(recent), seen, settings.n, count, N_STEPS) == ([1, 2], {1, 2}, 2, 1, 1)


def test_state_that_a_step_adds_is_removed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    snapshot = StepSnapshot(model, partial(step))
    step()
    snapshot.restore()
    assert not optimizer.state and model.weight.grad is None


def test_a_batch_is_only_read() -> None:
    model, batch = nn.Linear(2, 2), torch.zeros(2)
    snapshot = StepSnapshot(model, lambda: batch.add_(1))
    batch.add_(1)
    snapshot.restore()
    assert batch.tolist() == [1, 1]


def test_every_optimizer_of_the_model_is_found_and_no_other() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    assert {id(one) for one in optimizers_of(model)} == {id(one) for one in own} and others not in optimizers_of(model)


class Counts(nn.Module):
    n_calls = 0
    scale = 0.5
    seen: Any = [1]

    def forward(self) -> None:
        Counts.n_calls += 1
        Counts.seen.append(2)


def test_plain_values_of_a_class_are_put_back() -> None:
    model = nn.Sequential(Counts())
    start = SharedSnapshot(model)
    for _ in range(2):
        model[0]()
        model[0]()
        assert Counts.n_calls == 2
        start.restore()
        assert (Counts.n_calls, Counts.scale) == (0, 0.5)
    assert Counts.seen == [1, 2, 2, 2, 2]
