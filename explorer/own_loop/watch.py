"""`explorer.watch(model, optimizer, at=(2, 100), on_oom="oom.explorer")`: chosen steps, and the one that died.

    step 1 │ step 2 │ ...             a step ends where an optimizer that holds parameters of the model has stepped
           └ one hook of the optimizer counts; instruments are on from the end of the step before to the step's own end

Between the chosen steps no instrument is on. If memory is refused, the file is written before the exception leaves. The
file of a chosen step has the timeline until then; the file of another step has the tensors that Python still held.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from explorer.engine.bench.memory import memory_at_refusal
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.device.device import path_of_rank, rank_text
from explorer.engine.watch.scopes import ModuleHook
from explorer.engine.watch.uncompiled import never_compiled
from explorer.errors import BadInput, NotSaved, message_of
from explorer.own_loop.record_step import place_of_caller
from explorer.own_loop.recorded_run import RecordedRun
from explorer.plan.planners.confirm import refusal
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement

NEEDED_AT_REFUSAL = ("highspy", "numpy.ma")
"""Late imports of a plan. After a refusal of memory, a library finds no room."""
RESERVE_BYTES = 64 * 2**20
"""Address space reserved while watching and freed before the file is written, because memory has just run out."""


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    at: int | Collection[int] = (),
    worst_of: int = 0,
    on_oom: str | os.PathLike[str] | None = None,
) -> Watch:
    """Records the loop's steps in `at`, counted from 1, and keeps the worst of the first `worst_of` steps.

    `runs` holds the recorded steps by number. With `on_oom` the first step is recorded too, and a step that runs out
    of memory is written to the file before the exception leaves. The file has the refused request, the held bytes by
    owner, and a policy that would have fitted. Under torchrun each rank writes a file, `oom.rank3.explorer`. The watch
    ends with `close()`, or as a context manager.
    Raises BadInput for an empty request, a step before the first, or a file in a missing folder.
    """
    return Asked(at=at, worst_of=worst_of, on_oom=on_oom).of(model, optimizer, place_of_caller())


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of a watch: the steps to record, and the file for a refusal of memory."""

    at: int | Collection[int] = ()
    worst_of: int = 0
    on_oom: str | os.PathLike[str] | None = None

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> Watch:
        """An open watch. `where` names the loop in files and messages. Raises BadInput like `watch`."""
        at = tuple(self.at) if isinstance(self.at, Iterable) else (self.at,)
        if not at and not self.worst_of and self.on_oom is None:
            raise BadInput("Nothing to watch for.", hint="Give at=(2, 100), worst_of=20 or on_oom='oom.explorer'.")
        if not all(isinstance(step, Integral) and step >= 1 for step in at) or self.worst_of < 0:
            raise BadInput(
                f"Steps are counted from 1; asked for at={at}, worst_of={self.worst_of}.", hint="Step 1 is the first."
            )
        if self.on_oom is not None and not (folder := Path(self.on_oom).parent).is_dir():
            raise BadInput(
                f"{self.on_oom} is to be written where memory is refused, and there is no folder {folder}.",
                hint="Make the folder first: when memory is refused it is too late.",
            )
        watching = Watch(model, optimizer, at, where)
        watching.worst_of = self.worst_of
        watching.on_oom = None if self.on_oom is None else Path(self.on_oom)
        return watching.open()


class Watch:
    """A loop under watch, from `open` to `close`."""

    worst_of = 0
    on_oom: Path | None = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, at: Collection[int], where: str
    ) -> None:
        self.runs: dict[int, RecordedRun] = {}
        self.written: dict[int, Path] = {}
        """Files of requested steps, see `save_as`."""
        self.n_steps = 0
        """Steps that have ended."""
        self.where = where
        self._files = ""
        self._model, self._optimizer = model, optimizer
        self._at = frozenset(at)
        self._own = {id(parameter) for parameter in model.parameters()}
        self._live: LoopRecording | None = None
        self._hooks: list[Any] = []
        self._leaving: Any = None
        self._reserve: mmap.mmap | None = None
        self._before: Any = None
        self._plain: Any = None

    def open(self) -> Self:
        """Starts the watch. The running step is number 1."""
        try:
            if self.on_oom is not None:
                self.on_oom = path_of_rank(self.on_oom)
                for module in NEEDED_AT_REFUSAL:
                    with suppress(ImportError):  # the file says why it holds no plan
                        import_module(module)
                self._reserve = mmap.mmap(-1, RESERVE_BYTES)
                self._before, sys.excepthook = sys.excepthook, self._uncaught
                # Most loops fail in forward or backward. Their errors are caught while the frames hold the memory.
                self._listen()
                self._plain, torch.autograd.backward = torch.autograd.backward, self._backward
            if self._optimizer is not None:
                self._count(self._optimizer)
            else:
                self._hooks.append(register_optimizer_step_pre_hook(self._found))
            self._begin()
        except Exception as trouble:
            self._broken(trouble)
        return self

    def save_as(self, files: str) -> None:
        """Writes each requested step to `files` as soon as the step has ended, with `{step}` for the number.

        A file that cannot be written is a warning: the loop goes on.
        """
        self._files = files

    def close(self) -> None:
        """Removes all hooks of the watch. The running step is dropped."""
        try:
            self._close()
        except Exception as trouble:
            self._broken(trouble)

    def _close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._leaving is not None:
            self._leaving.remove()
            self._leaving = None
        self._end(None)
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before
        if torch.autograd.backward == self._backward:
            torch.autograd.backward = self._plain
        for below in (sys.excepthook, torch.autograd.backward):
            owner = getattr(below, "__self__", None)
            if isinstance(owner, Watch) and not owner._hooks:  # that watch was closed below this watch
                owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                self.refused(error)
            self.close()
        except Exception as trouble:
            self._broken(trouble)

    def refused(self, error: Exception) -> Path | None:
        """Writes the file of `on_oom` if `error` is the first out-of-memory, and returns its path.

        For loops that catch the error. No other error is ever raised in its place.
        """
        if self.on_oom is None or self._reserve is None:
            return None
        try:
            if not is_out_of_memory(error):
                return None
            self._reserve.close()
            self._reserve = None
            run = self._end(error) or self._held(error)
            assert run.failure is not None
            whole = max((one.measurement for one in self.runs.values()), key=_peak, default=None)
            told = replace(run.failure, hint=" ".join(_refusal(run, whole)) or run.failure.hint)
            path = RecordedRun(replace(run, failure=told)).save(self.on_oom)
        except Exception as trouble:  # memory is short: the error that ends the loop must be the loop's own
            error.add_note(f"Checkpoint Explorer could not write {self.on_oom}: {message_of(trouble)}")
            return None
        error.add_note(f"Checkpoint Explorer wrote {path}. {told.sentence} {told.hint}")
        return path

    def _listen(self) -> None:
        """Registers the watch's hook after the model's other hooks: a refusal removes a recorded step's hooks."""
        if self._leaving is not None:
            self._leaving.remove()
        self._leaving = self._model.register_forward_hook(ModuleHook(self._left), always_call=True)

    def _left(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # fullgraph=True refuses what cannot be traced
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            self.refused(error)

    @never_compiled
    def _backward(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._plain(*args, **kwargs)
        except Exception as error:
            self.refused(error)
            raise

    def _uncaught(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, Exception):
            self.refused(error)
        (self._before or sys.__excepthook__)(kind, error, traceback)

    @never_compiled
    def _found(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Counts the steps of the first optimizer that holds parameters of the model."""
        try:
            self._meet(optimizer)
        except Exception as trouble:
            self._broken(trouble)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if self._optimizer is None and not self._own.isdisjoint(held):
            self._optimizer = optimizer
            if self._live is not None:
                self._live.optimizer = optimizer
            self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts steps by a hook on the optimizer: torch runs global hooks later, and instruments change these."""
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # accelerate's wrapper
            optimizer = inner
        self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    @never_compiled
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self.n_steps += 1
            run = self._end(None)
            if run is not None:
                self._keep(self.n_steps, RecordedRun(run))
            self._begin()
        except Exception as trouble:
            self._broken(trouble)

    def _keep(self, step: int, run: RecordedRun) -> None:
        """Stores `run`. Only the worst of the first `worst_of` steps stays, with its file, and every step in `at`."""
        self.runs[step] = run
        among = [one for one in self.runs if one <= self.worst_of]
        worst = max(among, key=lambda one: self.runs[one].peak_bytes, default=None)
        for other in {*among} - {worst} - self._at:
            del self.runs[other]
            if other in self.written:
                self.written.pop(other).unlink(missing_ok=True)
        if self._files and step in self.runs and self._is_asked_for(step):
            self._write(step, path_of_rank(Path(self._files.replace("{step}", str(step)))))

    def _write(self, step: int, path: Path) -> None:
        try:
            self.written[step] = self.runs[step].save(path)
        except NotSaved as trouble:  # a full disk, say: hours of training are worth more than this file
            warnings.warn(f"Step {step} is recorded and has no file. {trouble}", stacklevel=2)

    def _is_asked_for(self, step: int) -> bool:
        return step in self._at or step <= self.worst_of

    def _begin(self) -> None:
        step = self.n_steps + 1
        if not self._is_asked_for(step) and (step > 1 or self.on_oom is None):
            return
        try:
            live = LoopRecording(self._model, self._optimizer, f"{self.where}, step {step}{rank_text()}")
            live.__enter__()
        except Exception as error:  # another profiler, say: the loop goes on
            self._unrecorded(step, error)
            return
        self._live = live
        if self._leaving is not None:
            self._listen()

    def _end(self, error: Exception | None) -> Measurement | None:
        """Ends the running step and returns its measurement; None if the step is not recorded."""
        live, self._live = self._live, None
        if live is None:
            return None
        try:
            live.__exit__(None if error is None else type(error), error, None)
            return live.measurement
        except Exception as trouble:
            self._unrecorded(max(self.n_steps, 1), trouble)
            return None
        finally:
            live.close()

    def _unrecorded(self, step: int, trouble: Exception) -> None:
        warnings.warn(f"Step {step} is not recorded. {message_of(trouble)}.", stacklevel=2)

    def _broken(self, trouble: Exception) -> None:
        """Warns and closes the watch. The loop goes on."""
        warnings.warn(f"{self.where} is not watched any more. {message_of(trouble)}.", stacklevel=2)
        with suppress(Exception):
            self._close()

    def _held(self, error: Exception) -> Measurement:
        where = f"{self.where}, step {self.n_steps + 1}{rank_text()}"
        device = LoopRecording(self._model, self._optimizer, where).device
        return memory_at_refusal(self._model, self._optimizer, device, where=where, error=error)


def _refusal(run: Measurement, whole: Measurement | None) -> tuple[str, ...]:
    """Sentences on a refusal, the held bytes first: a plan may need more memory, or a library, than there is."""
    try:
        return refusal(run, whole)
    except Exception as trouble:
        return (*refusal(run)[:1], f"No plan was made: {message_of(trouble)}")


def _peak(run: Measurement) -> int:
    return run.step_peak_bytes or 0
