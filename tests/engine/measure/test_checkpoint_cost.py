"""What a checkpoint takes beside its second forward: what the clock says more, by call, never less than nothing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from explorer.engine.measure.checkpoint_cost import N_MODULES, N_ROUNDS, checkpoint_ms


class Told:
    """A clock that reads what it is told."""

    name: Literal["process CPU time"] = "process CPU time"

    def __init__(self, readings: list[float]) -> None:
        self.readings = iter(readings)

    def mark(self) -> int:
        return 0

    def settle(self) -> None:
        """Nothing is under way."""

    def between_ms(self, first: Any, last: Any) -> float:
        return next(self.readings)


@pytest.mark.parametrize(("again", "expected"), [(10.0, (10.0 - 5.0 - 3.0) / N_MODULES), (6.0, 0.0)])
def test_it_is_the_middle_of_what_is_left_over(again: float, expected: float) -> None:
    rounds = [5.0, 3.0, again] * N_ROUNDS
    rounds[:3] = [5.0, 3.0, 1e6]  # a slow minute counts once
    position = torch.get_rng_state()
    assert checkpoint_ms(torch.device("cpu"), Told(rounds)) == expected
    assert torch.equal(torch.get_rng_state(), position)
