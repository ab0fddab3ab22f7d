"""Real steps of somebody's own under one policy after the other: all counted, all undone, all given the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.bench.user_step import N_TIMED, UserSteps
from explorer.engine.policy.apply import apply_policy
from explorer.errors import BadInput
from explorer.record import Policy


def loop() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 16)).square().sum().backward()
        optimizer.step()

    return model, step


def test_everything_is_as_found_after_recorded_and_timed_steps() -> None:
    model, step = loop()
    step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    position = torch.get_rng_state()
    with UserSteps(model, step, "train.py") as steps:
        kept, recomputed = steps.recorded(Policy()), steps.recorded(Policy.recompute(["0"]))
        assert steps.n_steps == 4
        assert kept is not None and recomputed is not None
        assert (kept.by_fqn["0"].n_recompute, recomputed.by_fqn["0"].n_recompute) == (0, 1)
        timed = steps.timed(kept)
        assert timed.times is not None and len(timed.times.step.ms) == N_TIMED
        assert len(timed.by_fqn["0"].forward.ms) == N_TIMED
        assert [len(times.step.ms) for times in steps.in_turns([Policy(), Policy.recompute(["0"])])] == [N_TIMED] * 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), position)


def test_the_graph_comes_from_a_step_that_never_reaches_backward() -> None:
    model, step = loop()
    with UserSteps(model, step, "train.py") as steps:
        graph = steps.graph()
    assert [block.fqn for block in graph.blocks] == ["", "0", "0.0", "0.1", "1"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_refusal_of_memory_is_no_error_and_everything_is_as_found() -> None:
    model, step = loop()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refused() -> None:
        step()
        raise MemoryError

    with UserSteps(model, refused, "train.py") as steps:
        assert steps.recorded(Policy()) is None and steps.in_turns([Policy()]) == []
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_that_takes_another_batch_each_time_is_refused() -> None:
    model, _ = loop()
    rows: Any = iter(range(1, 9))
    with (
        UserSteps(model, lambda: model(torch.ones(next(rows), 16)).sum().backward(), "train.py") as steps,
        pytest.raises(BadInput, match="in the first step of train.py and .* in a later one"),
    ):
        steps.recorded(Policy())


def test_a_policed_model_is_refused() -> None:
    model, step = loop()
    with apply_policy(model, Policy.recompute(["0"])), pytest.raises(BadInput, match="carries a policy already"):
        UserSteps(model, step, "train.py")
