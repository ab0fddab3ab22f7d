"""Random numbers of a forward inside backward that the forward itself never drew: for checkpointing of a model's own.

Whoever recomputes without setting its generators back draws others. No unit is known here, so a draw of the rerun is
held against all draws of the forward of its shape: masks of many elements are not equal by chance.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.compare.draws import random_numbers
from explorer.engine.watch.scopes import BlockScopes, Frame
from explorer.engine.watch.uncompiled import DispatchMode


class RerunDraws(DispatchMode):
    """Between enter and exit, around a step; `n_drawn` and `others` stand afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._scopes = BlockScopes(model, self)
        self._forward: dict[torch.Size, list[Tensor]] = defaultdict(list)
        self.n_drawn = 0
        """Draws of the forwards inside backward."""
        self.others: dict[str, int] = defaultdict(int)
        """How many of them forward had not made, by block; the empty string: in no block of its own."""

    def __enter__(self) -> RerunDraws:
        self._scopes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._scopes.__exit__(None, None, None)

    def entered(self, block: int, frame: Frame, inputs: Any) -> None:
        """Nothing to note: the stack is the frame's."""

    def left(self, block: int, frame: Frame, output: Any) -> None:
        """Nothing either."""

    def rerun_changed(self, frame: Frame) -> None:
        """No policy is in force."""

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
            self.others[self._scopes.fqns[self._scopes.frame.stack[-1]]] += 1
