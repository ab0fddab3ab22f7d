"""`Trainer(..., callbacks=[explorer.LightningCallback(at=2, on_oom="oom.explorer")])`."""

from __future__ import annotations

from lightning.pytorch import Callback
from torch import nn

from explorer.own_loop.watch import WatchCallback


class LightningCallback(WatchCallback, Callback):
    """Watches the optimizer steps of one fit, as `explorer.watch` does."""

    def on_train_start(self, trainer: object, pl_module: nn.Module) -> None:
        """Begins the watch: the model is on its training device, and the optimizers exist."""
        self.begin(pl_module, None, type(pl_module).__name__)

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Writes the file of a refused step, before the error leaves the trainer, and ends the watch."""
        if self.watch is not None and isinstance(exception, Exception):
            self.watch.refused(exception)
        self.end()

    def on_train_end(self, trainer: object, pl_module: object) -> None:
        """Ends the watch. Trainer calls this hook also after a stop."""
        self.end()
