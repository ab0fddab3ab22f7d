"""Shared base of the callbacks of all trainers: the request, and the watch from a training's start to its end."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import nn

from explorer.own_loop.watch import Asked, Watch


class Watching:
    """Watches the optimizer steps of one training, as `explorer.watch` does."""

    def __init__(
        self,
        *,
        at: int | Collection[int] = (),
        worst_of: int = 0,
        on_oom: str | os.PathLike[str] | None = None,
        files: str = "step{step}.explorer",
    ) -> None:
        """`files`: the path of a chosen step's file, with `{step}` for the step's number."""
        self.watch: Watch | None = None
        self._asked = Asked(at=at, worst_of=worst_of, on_oom=on_oom)
        self._files = files

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        """Starts the watch of a model that is on its training device, and ends the watch of an interrupted training.
        Raises BadInput like `explorer.watch`."""
        self.end()
        self.watch = self._asked.of(model, optimizer, where)
        self.watch.save_as(self._files)

    def end(self) -> None:
        """Closes the watch."""
        if self.watch is not None:
            self.watch.close()
