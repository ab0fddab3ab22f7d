"""`with explorer.record_step(model, optimizer) as run:` around one step of the caller's own loop.

The result is a run like a measured one: the page opens its file, the Runs list keeps it, every policy can be forecast
from it. Demand: https://github.com/pytorch/pytorch/issues/32101
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from explorer.engine.measure.live import LiveStep
from explorer.errors import BadInput, message_of
from explorer.own_loop.recorded_run import RecordedRun

if TYPE_CHECKING:
    import torch
    from torch import nn


class RecordedStep(RecordedRun):
    """The step between enter and exit. What the step raises passes through; the run until then is kept."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        super().__init__()
        self._step = (model, optimizer, where)
        self._live: LiveStep | None = None

    def __enter__(self) -> Self:
        try:
            if self._measurement is not None:
                raise BadInput("A step was recorded in it already.", hint="Call explorer.record_step once a step.")
            live = LiveStep(*self._step)
            live.__enter__()
            self._live = live
        except Exception as trouble:
            self._unrecorded(trouble)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.__exit__(kind, error, traceback)
            run = live.measurement
            if error is None and run.allocations is not None and not any(run.allocations.born):
                raise BadInput(
                    "Nothing was allocated inside.", hint="Put a whole step inside: forward, backward, optimizer."
                )
            self._measurement = run
        except Exception as trouble:
            self._unrecorded(trouble)
        finally:
            live.close()

    def _unrecorded(self, trouble: Exception) -> None:
        """The step belongs to a training, which no instrument ends."""
        self._why_not = f"The step of {self._step[2]} is not recorded. {message_of(trouble)}."
        warnings.warn(self._why_not, stacklevel=3)


def record_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RecordedStep:
    """Records the training step inside the `with` block: phases, every allocation, FLOPs, blocks that ran again.

    Nothing of the caller's changes: weights, generators, modes, hooks and gradients are bitwise as without it; other
    steps cost nothing. A step that cannot be recorded is a warning: another profiler or dispatch mode is on, the model
    lies on another device than cpu or cuda, nothing was allocated inside, or an instrument failed.
    """
    return RecordedStep(model, optimizer, place_of_caller())


def place_of_caller() -> str:
    """`train.py:42`: where the caller of the public function that asks was called."""
    frame: Any = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
