"""`Trainer(..., callbacks=[explorer.HuggingFaceCallback(at=2, on_oom="oom.explorer")])`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from transformers import TrainerCallback

from explorer.own_loop.watch import Watch, watch


class HuggingFaceCallback(TrainerCallback):
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
        self._asked: dict[str, Any] = {"at": at, "worst_of": worst_of, "on_oom": on_oom}
        self._files = files

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model stands where it is trained, and the optimizer is made."""
        self.watch = watch(kwargs["model"], kwargs.get("optimizer"), **self._asked)
        self.watch.where = "Trainer"
        self.watch.save_as(self._files)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also after a stop; not after an error."""
        if self.watch is not None:
            self.watch.close()
