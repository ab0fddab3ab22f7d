"""`Trainer(..., callbacks=[explorer.HuggingFaceCallback(at=2, on_oom="oom.explorer")])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from explorer.own_loop.watch import WatchCallback


class HuggingFaceCallback(WatchCallback, TrainerCallback):
    """Watches the optimizer steps of one training, as `explorer.watch` does."""

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """Begins the watch: the model is on its training device, and the optimizer exists."""
        self.begin(kwargs["model"], kwargs.get("optimizer"), "Trainer")

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Ends the watch. Trainer calls this hook also after a stop, but not after an error."""
        self.end()
