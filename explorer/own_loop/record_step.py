"""`with explorer.record_step(model, optimizer) as run:` around one step of the caller's loop.

The result is like a measured run: the page opens its file, the Runs list stores the run, every policy can be forecast.
Demand: https://github.com/pytorch/pytorch/issues/32101
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from explorer.engine.bench.user_loop import LoopRecording
from explorer.errors import BadInput, message_of
from explorer.own_loop.recorded_run import RecordedRun

if TYPE_CHECKING:
    import torch
    from torch import nn


class RecordedStep(RecordedRun):
    """The step between enter and exit. Errors of the step pass through, and the run until the error is kept."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        super().__init__()
        self._step = (model, optimizer, where)
        self._live: LoopRecording | None = None

    def __enter__(self) -> Self:
        try:
            if self._measurement is not None:
                raise BadInput("A step was recorded in it already.", hint="Call explorer.record_step once a step.")
            live = LoopRecording(*self._step)
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
        """Warns that the step is not recorded. An instrument never ends the training."""
        self._why_not = f"The step of {self._step[2]} is not recorded. {message_of(trouble)}."
        warnings.warn(self._why_not, stacklevel=3)


def record_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RecordedStep:
    """Records the training step inside the `with` block: phases, every allocation, FLOPs, blocks that ran again.

    Weights, generators, modes, hooks and gradients stay bitwise as without the recording. Other steps cost nothing. A
    step that cannot be recorded is a warning: another profiler or dispatch mode is on, the model is on another device
    than cpu or cuda, nothing was allocated inside, or an instrument failed.
    """
    return RecordedStep(model, optimizer, place_of_caller())


def place_of_caller() -> str:
    """`train.py:42`: the line of the user's call of the public function that calls this one."""
    frame: Any = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
