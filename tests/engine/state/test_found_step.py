"""All that a step can reach comes back bit by bit, in the very objects that stood there."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from explorer.engine.state.snapshot import StepSnapshot, optimizers_of

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
    found_state = StepSnapshot(model, step)
    for _ in range(2):
        step()
        found_state.restore()
        assert torch.equal(model.weight, weight) and torch.equal(model.weight.grad, gradient)
        assert optimizer.state[model.weight]["momentum_buffer"] is moment and torch.equal(moment, momentum)
        assert schedule.get_last_lr() == rate and torch.equal(torch.get_rng_state(), position)
        assert logs.losses is losses and len(losses) == 1
        assert (list(recent), seen, settings.n, count, N_STEPS) == ([1, 2], {1, 2}, 2, 1, 1)


def test_state_that_did_not_stand_there_goes() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    found_state = StepSnapshot(model, partial(step))
    step()
    found_state.restore()
    assert not optimizer.state and model.weight.grad is None


def test_a_batch_is_only_read() -> None:
    model, batch = nn.Linear(2, 2), torch.zeros(2)
    found_state = StepSnapshot(model, lambda: batch.add_(1))
    batch.add_(1)
    found_state.restore()
    assert batch.tolist() == [1, 1]


def test_every_optimizer_of_the_model_is_found_and_no_other() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    assert {id(one) for one in optimizers_of(model)} == {id(one) for one in own} and others not in optimizers_of(model)
