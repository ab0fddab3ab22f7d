"""Finds random numbers of a recompute that the forward never drew, in models that checkpoint themselves.

A recompute that does not restore its generators draws other numbers. The units of such a model are not known, so each
draw is compared with all forward draws of its shape: masks of many elements are not equal by chance.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.compare.draws import random_numbers
from explorer.engine.watch.scopes import BlockWatch


class RerunDraws(BlockWatch):
    """Counts draws between enter and exit, around a step, in `n_drawn` and `others`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._forward: dict[torch.Size, list[Tensor]] = defaultdict(list)
        self.n_drawn = 0
        """Number of draws of forwards inside backward."""
        self.others: dict[str, int] = defaultdict(int)
        """Number of such draws that forward did not make, by block; the empty string is the model itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            draw = random_numbers(func, args, kwargs or {}, result)
            if draw is not None:
                self._saw(draw)
        return result

    def _saw(self, draw: Tensor) -> None:
        known = self._forward[draw.shape]
        if torch._C._current_graph_task_id() == -1:
            known.append(draw)
            return
        self.n_drawn += 1
        if not any(torch.equal(draw, one) for one in known):
            self.others[self.running] += 1
