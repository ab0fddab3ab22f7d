"""What a checkpoint takes beside its second forward, by the clock: a call, and a saved tensor."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from explorer.engine.bench.checkpoint_cost import FEW, MANY, N_MODULES, N_ROUNDS, read_cost


class Told:
    """A clock by which a step takes what it is told; every module and every sweep in it takes a millisecond."""

    name: Literal["process CPU time"] = "process CPU time"

    def __init__(self, steps: list[float]) -> None:
        self.steps = iter(steps)
        self._now = 0

    def mark(self) -> int:
        self._now += 1
        return self._now

    def settle(self) -> None:
        """Nothing is under way."""

    def between_ms(self, first: Any, last: Any) -> float:
        return next(self.steps) if last - first > 1 else 1.0


def steps(*calls: float) -> list[float]:
    """Each reading is a kept step and another: less the forward of the modules, the difference is what was asked."""
    rounds = (call for call in calls for _ in range(N_ROUNDS))
    return [10.0 + more for call in rounds for more in (0.0, N_MODULES * (call + 1.0))]


@pytest.mark.parametrize(
    ("swept", "few", "many", "expected"),
    [
        (3.0 + FEW * 0.1, 1.0 + FEW * 0.1, 1.0 + MANY * 0.1, (3.0, 1.0, 0.1)),
        (2.0, 1.0, 0.5, (2.0, 1.0, 0.0)),  # nothing is negative
        (-1.0, -1.0, -1.0, (0.0, 0.0, 0.0)),
    ],
)
def test_it_is_the_middle_of_what_is_left_over(
    swept: float, few: float, many: float, expected: tuple[float, ...]
) -> None:
    rounds = steps(swept, few, many)
    rounds[1] = 1e6  # a slow minute counts once
    position = torch.get_rng_state()
    assert read_cost(torch.device("cpu"), Told(rounds)) == pytest.approx(expected)
    assert torch.equal(torch.get_rng_state(), position)
