"""`Trainer(..., callbacks=[explorer.LightningCallback(at=2, on_oom="oom.explorer")])`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from lightning.pytorch import Callback

from explorer.own_loop.watch import Watch, watch


class LightningCallback(Callback):
    """Watches the optimizer steps of one fit, as `explorer.watch` does."""

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
        self._asked: dict[str, Any] = {"at": at, "worst_of": worst_of, "on_oom": on_oom}
        self._files = files

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model stands where it is trained, and the optimizers are made."""
        self.watch = watch(pl_module, **self._asked)
        self.watch.where = type(pl_module).__name__
        self.watch.save_as(self._files)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The error has not left yet."""
        if self.watch is not None and isinstance(exception, Exception):
            self.watch.refused(exception)
            self.watch.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Also after a stop."""
        if self.watch is not None:
            self.watch.close()
