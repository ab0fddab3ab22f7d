"""Clocks charge the step: by phase, by block, with everything below a block charged to it."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from explorer.engine.device.clocks import CpuClock
from explorer.engine.measure.stopwatch import block_ms, step_ms
from explorer.engine.step import prepare, run_step
from explorer.engine.world.as_found import left_as_found
from explorer.record import Policy, RunSpec, Unit
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


def test_cpu_time_is_in_milliseconds() -> None:
    assert CpuClock().between_ms(1_000_000, 3_500_000) == 2.5
    clock = CpuClock()
    assert clock.mark() <= clock.mark()


def test_phases_of_a_step_add_up() -> None:
    with left_as_found():
        clock = Ticking()
        took = step_ms(prepare(RunSpec(model=ref("chain"), n_accumulation=2)), clock)
    assert took == {"forward": 2, "backward": 2, "optimizer": 1, "step": 5}
    assert clock.n_settled == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_is_charged_with_its_ancestors(reentrant: bool) -> None:
    policy = Policy.recompute(["1", "2"], use_reentrant=reentrant)
    with left_as_found():
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
    with left_as_found():
        trainee = prepare(RunSpec(model=ref("chain"), policy=policy))
        run_step(trainee)
        took = block_ms(trainee, policy, Ticking())
    assert took["", True] == took["1", True] + took["2", True]
