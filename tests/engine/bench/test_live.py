"""A step of somebody's own loop: its borders are found, its exception passes, and what it held until then is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.policy.apply import apply_policy
from explorer.errors import BadInput
from explorer.record import Policy


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16))


def live(model: nn.Module) -> LoopRecording:
    return LoopRecording(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "train.py")


def test_borders_are_those_of_model_backward_and_optimizer() -> None:
    model = net()
    step = live(model)
    assert step.optimizer is not None
    with step:
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
        step.optimizer.step()
    run = step.measurement
    phases = [span.phase for span in run.phases]
    assert [phase for phase in phases if phase != "between"] == ["forward", "backward"] * 2 + ["optimizer"]
    assert run.spec.optimizer == "sgd" and run.spec.n_accumulation == 2 and run.failure is None
    assert run.graph is not None and [block.fqn for block in run.graph.blocks] == ["", "0", "0.0", "0.1", "1"]
    assert run.forward_flops == 2 * 2 * (2 * 8 * 16 * 16)


def test_a_policy_in_force_is_recorded_with_what_ran_again() -> None:
    model = net()
    step = live(model)
    with apply_policy(model, Policy.recompute(["0"])), step:
        model(torch.ones(8, 16)).sum().backward()
    assert step.measurement.spec.policy.units[0].blocks == ("0",)
    assert step.measurement.by_fqn["0"].n_recompute == 1 and step.measurement.by_fqn["1"].n_recompute == 0


def test_an_exception_passes_and_the_record_stands() -> None:
    model = net()
    step = live(model)
    with pytest.raises(ValueError, match="in the loop"), step:
        model(torch.ones(8, 16))
        raise ValueError("in the loop")
    failure = step.measurement.failure
    assert failure is not None and "in the loop" in failure.sentence
    assert step.measurement.step_peak_bytes is None and step.measurement.by_fqn["0"].n_forward == 1


def test_two_instruments_at_once_are_refused_and_the_first_goes_on() -> None:
    model = net()
    first = live(model)
    with first:
        with pytest.raises(BadInput), live(model):
            pass
        model(torch.ones(8, 16)).sum().backward()
    assert first.measurement.by_fqn["0"].n_forward == 1
