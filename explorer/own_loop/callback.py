"""What the callbacks of all trainers share: what was asked for, and the watch from a training's start to its end."""

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
        """`files`: where a chosen step is written, `{step}` for its number."""
        self.watch: Watch | None = None
        self._asked = Asked(at=at, worst_of=worst_of, on_oom=on_oom)
        self._files = files

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        """The model stands where it is trained; a training that broke off before is over. Raises BadInput as
        `explorer.watch` does."""
        self.end()
        self.watch = self._asked.of(model, optimizer, where)
        self.watch.save_as(self._files)

    def end(self) -> None:
        """Nothing of the watcher stays behind."""
        if self.watch is not None:
            self.watch.close()
