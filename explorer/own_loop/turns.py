"""The end of a step in which several optimizers take turns: every parameter has been stepped.

    discriminator │ discriminator │ generator ▏ discriminator │ discriminator │ generator ▏
                                       step 1                                      step 2

Parameters of an optimizer that stays silent while a different one steps often are left out until they are stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

MOST_TURNS = 6
"""A critic takes five steps for one of the generator (https://arxiv.org/abs/1701.07875)."""


class Turns:
    """Which parameters have been stepped since the last step ended."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        several = list(optimizers)
        self._is_one = len(several) == 1
        self._trained = set[int]().union(*map(_parameters, several))
        self._stepped: set[int] = set()
        self._n_steps: Counter[int] = Counter()

    def ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Notes a step of `optimizer`; True if it ends the step of the training."""
        if self._is_one:
            return True
        self._n_steps[id(optimizer)] += 1
        parameters = _parameters(optimizer)
        self._trained |= parameters
        self._stepped |= parameters
        if self._n_steps[id(optimizer)] > MOST_TURNS:
            self._trained &= self._stepped
        if not self._trained <= self._stepped:
            return False
        self._stepped.clear()
        self._n_steps.clear()
        return True


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
