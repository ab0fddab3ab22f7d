"""Callbacks that watch the optimizer steps of one training, as `explorer.watch` does.

    Trainer(..., callbacks=[explorer.HuggingFaceCallback(at=2, on_oom="oom.explorer")])
    Trainer(..., callbacks=[explorer.LightningCallback(at=2, on_oom="oom.explorer")])

Either class is made at its first use, because its base is a class of a library that takes seconds to import.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module
from typing import Any

import torch
from torch import nn

from explorer.own_loop.watch import Watch
from explorer.own_loop.watch_request import WatchRequest


class WatchCallback:
    """Watches the optimizer steps of one training. Base of the callbacks of all trainers."""

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
        self._request = WatchRequest(at=at, worst_of=worst_of, on_oom=on_oom, files=files)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        """Starts a watch on the model's training device, after an interrupted one. Raises BadInput as `watch` does."""
        self.end()
        self.watch = Watch(model, optimizer, self._request, where)

    def end(self) -> None:
        """Closes the watch."""
        if self.watch is not None:
            self.watch.close()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """A trainer calls this hook also after a stop; transformers' Trainer does not after an error."""
        self.end()


class HuggingFaceHooks(WatchCallback):
    """The hooks of transformers' Trainer."""

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        self.begin(kwargs["model"], kwargs.get("optimizer"), "Trainer")


class LightningHooks(WatchCallback):
    """The hooks of Lightning's Trainer."""

    def on_train_start(self, trainer: object, pl_module: nn.Module) -> None:
        self.begin(pl_module, None, type(pl_module).__name__)

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Writes the file of a refused step, before the error leaves the trainer, and ends the watch."""
        if self.watch is not None and isinstance(exception, Exception):
            self.watch.refused(exception)
        self.end()


_LIBRARIES = {
    "HuggingFaceCallback": (HuggingFaceHooks, "transformers", "TrainerCallback"),
    "LightningCallback": (LightningHooks, "lightning.pytorch", "Callback"),
}


def __getattr__(name: str) -> Any:
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hooks, library, base = _LIBRARIES[name]
    bases = (hooks, getattr(import_module(library), base))
    globals()[name] = kind = type(name, bases, {"__doc__": hooks.__doc__, "__module__": __name__})
    return kind
