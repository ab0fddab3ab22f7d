"""The clock charges the step: by phase, by block, with everything below a block charged to it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from explorer.engine.bench.checkpoint_cost import CheckpointCost
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.bench.timing import (
    BlockSamples,
    OperatorTimes,
    Timed,
    block_ms,
    live_block_ms,
    live_step_ms,
    step_ms,
)
from explorer.engine.state.global_state import preserve_global_state
from explorer.record import Policy, RunSpec, Unit
from explorer.record.measurement import Samples
from tests.engine.tiny_nets import ref


class Ticking:
    """A clock that advances by one millisecond a reading: makes times exact."""

    name: Literal["process CPU time"] = "process CPU time"

    def __init__(self) -> None:
        self.now = 0
        self.n_settled = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def settle(self) -> None:
        self.n_settled += 1

    def between_ms(self, first: Any, last: Any) -> float:
        return float(last - first)


def test_phases_of_a_step_add_up() -> None:
    with preserve_global_state():
        clock = Ticking()
        took = step_ms(prepare(RunSpec(model=ref("chain"), n_accumulation=2)), clock)
    assert took == {"forward": 2, "backward": 2, "optimizer": 1, "step": 5}
    assert clock.n_settled == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_is_charged_with_its_ancestors(reentrant: bool) -> None:
    policy = Policy.recompute(["1", "2"], use_reentrant=reentrant)
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), policy=policy))
        run_step(trainee)
        took = block_ms(trainee, policy, Ticking())
    again = {fqn for fqn, rerun in took if rerun}
    assert again == {"", "1", "2", "1.0", "1.1", "2.0", "2.1"} or again == {"", "1", "2", "1.0", "2.0"}
    assert took["", True] == took["1", True] + took["2", True]
    assert took["1", True] > took["1.0", True]
    assert took["", False] > sum(took[fqn, False] for fqn in "0123")


def test_a_segments_blocks_are_charged_one_by_one() -> None:
    policy = Policy(units=(Unit(blocks=("1", "2")),))
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), policy=policy))
        run_step(trainee)
        took = block_ms(trainee, policy, Ticking())
    assert took["", True] == took["1", True] + took["2", True]


def test_a_step_of_somebodys_own_is_charged_by_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clock = Ticking()

    def step() -> None:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        clock.mark()  # its optimizer

    assert live_step_ms(model, step, clock) == {"forward": 2, "backward": 2, "step": 10}
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_blocks_of_a_step_of_somebodys_own_run_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    took = live_block_ms(model, lambda: model(torch.ones(1, 2)).sum().backward(), Ticking())
    assert took == {("0", False): 1, ("1", False): 1, ("", False): 5}


def test_readings_become_samples_and_none_become_nothing() -> None:
    assert Timed().times("process CPU time") is None and Timed().block_samples() == {}
    timed = Timed(
        steps=[{"step": 3.0, "forward": 1.0, "backward": 2.0}, {"step": 5.0, "forward": 2.0, "backward": 3.0}],
        blocks=[{("a", False): 1.0, ("a", True): 0.5}, {("a", False): 2.0}],
        checkpoint=CheckpointCost(call_ms=0.25, close_call_ms=0.125, saved_tensor_ms=0.5),
    )
    times = timed.times("process CPU time")
    assert times is not None
    assert (times.checkpoint_ms, times.close_checkpoint_ms, times.saved_tensor_ms) == (0.25, 0.125, 0.5)
    assert (times.step.ms, times.forward.ms, times.optimizer.ms) == ((3.0, 5.0), (1.0, 2.0), ())
    assert timed.block_samples() == {"a": BlockSamples(forward=Samples(ms=(1.0, 2.0)), recompute=Samples(ms=(0.5,)))}


def test_a_kept_operator_costs_what_forwards_took_more_that_looked_at_every_one() -> None:
    timed = Timed(steps=[{"forward": ms} for ms in (10.0, 11.0, 12.0, 50.0)], looked_at=[14.0, 99.0, 15.0])
    assert timed.kept_operator_ms is None, "nobody counted operators"
    timed.operators = {"": OperatorTimes(n_calls=8)}
    assert timed.kept_operator_ms == 2 * 4.0 / 8, "forward and rerun; a slow minute counts once"
    timed.looked_at = [1.0, 1.0, 1.0]
    assert timed.kept_operator_ms == 0
    assert Timed().kept_operator_ms is None
