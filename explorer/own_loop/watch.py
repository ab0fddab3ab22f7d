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
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from explorer.engine.bench.memory import Optimizers, each_optimizer, memory_at_refusal
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.device.device import path_of_rank, rank_text
from explorer.engine.policy.several_models import Models, called_models, one_model
from explorer.engine.state.snapshot import optimizers_of
from explorer.engine.watch.checkpoint_error import add_note
from explorer.engine.watch.modes import never_compiled
from explorer.engine.watch.scopes import ModuleHook, around_backward
from explorer.errors import BadInput, NotSaved, message_of
from explorer.own_loop.record_step import RecordedRun, place_of_caller
from explorer.own_loop.turns import Turns
from explorer.own_loop.watch_request import HEAL, WatchRequest
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement

if TYPE_CHECKING:
    from explorer.own_loop.heal import Healed, Healer

NEEDED_AT_REFUSAL = ("highspy", "numpy.ma")
"""Late imports of a plan. After a refusal of memory, a library finds no room."""
FAILED = "oom.explorer"
"""File of a step that cannot run again."""
RESERVE_BYTES = 64 * 2**20
"""Address space reserved while watching and freed before the file is written, because memory has just run out."""


def watch(
    model: Models,
    optimizer: Optimizers = None,
    *,
    at: int | Collection[int] = (),
    worst_of: int = 0,
    on_oom: str | os.PathLike[str] | None = None,
) -> Watch:
    """Records the loop's steps in `at`, counted from 1, and keeps the worst of the first `worst_of` steps.

    Several models are given by name, `{"netG": netG, "netD": netD}`, and their optimizers as a list. A step then ends
    when each optimizer has stepped.

    `runs` holds the recorded steps by number. With `on_oom` the first step is recorded too, and a step that runs out
    of memory is written to the file before the exception leaves. The file has the refused request, the held bytes by
    owner, and a policy that would have fitted. Under torchrun each rank writes a file, `oom.rank3.explorer`.
    With `on_oom="heal"` a refused step runs again with more blocks recomputed, and the training goes on, see heal.py.
    `healed` lists such steps; each has a file, `healed.step7.explorer`. The watch ends with `close()`, or as a context
    manager.
    Raises BadInput for an empty request, a step before the first, or a file in a missing folder.
    """
    return Watch(one_model(model), optimizer, WatchRequest(at=at, worst_of=worst_of, on_oom=on_oom), place_of_caller())


class StopAfterRecord(SystemExit):
    """Ends a training whose requested steps are recorded. No `except Exception` of the training catches it."""


class Watch:
    """A loop under watch, from construction to `close`. The running step is number 1."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, request: WatchRequest, where: str) -> None:
        """`where` names the loop in files and messages. Raises BadInput like `watch`."""
        self.runs: dict[int, RecordedRun] = {}
        self.written: dict[int, Path] = {}
        """Files of requested steps, see `save_as`."""
        self.n_steps = 0  # that have ended
        self.where = where
        self._request = request
        self._steps, self._worst_of, self._files = request.steps(), request.worst_of, request.files
        self.on_oom = None if request.on_oom is None else Path(FAILED if request.on_oom == HEAL else request.on_oom)
        if request.on_oom is not None:
            import_module("explorer.plan.planners.confirm")  # for `_refusal`: no import where memory is short
        self._healer: Healer | None = None
        if request.on_oom == HEAL:
            self._healer = import_module("explorer.own_loop.heal").Healer(model, self._record_of)
        self._log: Callable[[int, dict[str, float]], object] | None = None
        self._model, self._optimizers = model, optimizer
        self._turns: Turns | None = None
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._recording: LoopRecording | None = None
        self._hooks = ExitStack()
        self._forward_hooks = ExitStack()
        self._reserve: mmap.mmap | None = None
        self._is_refused = self._closed = False
        self._excepthook = sys.excepthook
        try:
            self._open()
        except Exception as trouble:
            self._broken(trouble)

    def _open(self) -> None:
        if self.on_oom is not None:  # else a watch that is not closed would hold a model that its loop lets go
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
            self.on_oom = path_of_rank(self.on_oom)
            for module in NEEDED_AT_REFUSAL:
                with suppress(ImportError):  # the file says why it holds no plan
                    import_module(module)
            self._take_reserve()
            # Most loops fail in forward or backward. Their errors are caught while the frames hold the memory.
            self._listen()
            healing = self._healer.backward_listeners if self._healer else {}
            in_forward = None if self._healer else lambda: False  # the healer repeats no call of torch.autograd.grad
            self._hooks.enter_context(around_backward(failed=self.refused, in_forward=in_forward, **healing))
        if self._optimizers is not None:
            self._count(each_optimizer(self._optimizers))
        else:
            self._hooks.callback(register_optimizer_step_pre_hook(self._optimizer_steps).remove)
        self._begin()

    @property
    def healed(self) -> list[Healed]:
        """Refused steps that ran again, see heal.py."""
        return [] if self._healer is None else self._healer.healed

    def save_as(self, files: str) -> None:
        """Writes each requested step to `files` as soon as the step has ended, with `{step}` for the number.

        A file that cannot be written is a warning: the loop goes on.
        """
        self._files = files

    def log_to(self, log: Callable[[int, dict[str, float]], object]) -> None:
        """Calls `log(step, scalars)` after each recorded step, see `RecordedRun.scalars`.

        An error of `log` is a warning: the loop goes on.
        """
        self._log = log

    def close(self) -> None:
        """Removes all hooks of the watch. The running step is dropped."""
        try:
            self._close()
        except Exception as trouble:
            self._broken(trouble)

    def _close(self) -> None:
        self._hooks.close()
        self._forward_hooks.close()
        if self._healer is not None:
            self._healer.close()
        self._end(None)
        if (self._request.last or self._request.steady) and self.runs and not self._closed:
            self._write(max(self.runs))
        self._release_reserve()
        self._closed = True
        while isinstance(owner := getattr(sys.excepthook, "__self__", None), Watch) and owner._closed:
            sys.excepthook = owner._excepthook  # watches may be closed in any order

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

        torch's CheckpointError gets a note with the line at which the recompute departs. For loops that catch the
        error. No other error is ever raised in its place.
        """
        add_note(error, self._model)
        if self.on_oom is None or self._closed or self._is_refused:
            return None
        try:
            if not is_out_of_memory(error):
                return None
            self._is_refused = True
            run = (self._healer and self._healer.refusal) or self._record_of(error)
            assert run.failure is not None
            runs = (recorded.measurement for recorded in self.runs.values())
            whole = max(runs, key=lambda run: run.step_peak_bytes or 0, default=None)
            failure = replace(run.failure, hint=" ".join(_refusal(run, whole)) or run.failure.hint)
            if self._healer is not None:
                failure = replace(failure, hint=f"{failure.hint} Not healed: {self._healer.reason}.")
            path = RecordedRun(replace(run, failure=failure)).save(self.on_oom)
        except Exception as trouble:  # memory is short: the error that ends the loop must be the loop's own
            error.add_note(f"Checkpoint Explorer could not write {self.on_oom}: {message_of(trouble)}")
            return None
        error.add_note(f"Checkpoint Explorer wrote {path}. {failure.sentence} {failure.hint}")
        return path

    def _take_reserve(self) -> None:
        with suppress(OSError):  # a training near its limit has no room to spare
            self._reserve = self._reserve or mmap.mmap(-1, RESERVE_BYTES)

    def _release_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def _listen(self) -> None:
        """Registers the watch's hook after the model's other hooks: a refusal removes a recorded step's hooks.

        A model compiled in place (`model.compile()`) has none: the compiler would cut its graph at the hook.
        """
        self._forward_hooks.close()
        for model in (each for each in called_models(self._model) if each._compiled_call_impl is None):
            hook = model.register_forward_hook(ModuleHook(self._after_forward), always_call=True)
            self._forward_hooks.callback(hook.remove)

    def _after_forward(self, model: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():  # fullgraph=True refuses what cannot be traced
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and self._healer is None:  # the healer is asked first: it is outside of hooks
            self.refused(error)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.refused(error)
        self._excepthook(kind, error, traceback)

    @never_compiled
    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Counts the steps of the first optimizer that holds parameters of the model."""
        if self._closed:
            return
        try:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if self._turns is None and self._parameters & stepped:
                several = optimizers_of(self._model) if len(called_models(self._model)) > 1 else [optimizer]
                self._optimizers = several
                self._count(several)
        except Exception as trouble:  # torch iterates over the global hooks now
            self._close_later(trouble)

    def _close_later(self, trouble: Exception) -> None:
        """Closes the watch before the next forward: a backward restores the modes that a recording entered or left."""
        self._warn(trouble)
        self._closed = True
        with suppress(Exception):
            if self._healer is not None:
                self._healer.forget()
            for model in called_models(self._model):
                self._hooks.callback(model.register_forward_pre_hook(ModuleHook(lambda *_: self.close())).remove)

    def _count(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Counts steps by hooks on the optimizers: torch runs global hooks later, and instruments change these."""
        inner = {id(plain): plain for plain in map(_without_wrapper, optimizers)}
        self._turns = Turns(inner.values())
        for optimizer in inner.values():
            self._hooks.callback(optimizer.register_step_post_hook(self._stepped).remove)

    @never_compiled
    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._closed:
            return
        try:
            if torch._C._current_graph_task_id() != -1:
                raise BadInput("The optimizer steps inside backward.", hint="Put record_step around one step")
            if self._turns is not None and not self._turns.ends_step(optimizer):
                return
            self.n_steps += 1
            run = self._end(None)
            if run is not None:
                self._keep(self.n_steps, RecordedRun(run))
            if self._healer is not None:
                self._healer.step_ended(self.n_steps, run)
                self._take_reserve()
            if self._request.stop and self.n_steps >= max((*self._steps, self._worst_of)):
                raise StopAfterRecord(0)
            self._begin()
        except Exception as trouble:  # torch iterates over the hooks now
            self._close_later(trouble)

    def _keep(self, step: int, run: RecordedRun) -> None:
        """Stores `run`. The worst of the first `worst_of` steps stays, with its file, and every step in `at`.

        With `last`, the latest step stays too.
        """
        self.runs[step] = run
        if self._log is not None:
            try:
                self._log(step, run.scalars())
            except Exception as trouble:
                warnings.warn(f"Step {step} is recorded and not logged. {message_of(trouble)}.", stacklevel=2)
        first = {number for number in self.runs if number <= self._worst_of}
        worst = max(sorted(first), key=lambda number: self.runs[number].peak_bytes, default=None)
        dropped = set(self.runs) - {step} if self._request.last or self._request.steady else first
        for other in dropped - {worst} - self._steps:
            del self.runs[other]
            if other in self.written:
                self.written.pop(other).unlink(missing_ok=True)
        if step in self.runs and (step in self._steps or step <= self._worst_of):
            self._write(step)

    def _write(self, step: int) -> None:
        if not self._files or step in self.written:
            return
        from explorer.plan.why.checkpointing import checkpointing_lines

        try:
            path = path_of_rank(Path(self._files.replace("{step}", str(step))))
            self.written[step] = self.runs[step].save(path)
            for line in (f"Wrote step {step} to {path}.", *checkpointing_lines(self.runs[step].measurement)):
                self._request.say(line)
            self._request.recorded(self.runs[step].measurement, path)
        except NotSaved as trouble:  # a full disk, say: hours of training are worth more than this file
            warnings.warn(f"Step {step} is recorded and has no file. {trouble}", stacklevel=2)
        except Exception as trouble:
            warnings.warn(f"Step {step} is in {path} and not printed. {message_of(trouble)}.", stacklevel=2)

    def _is_requested(self, step: int) -> bool:
        if self._request.last or (self._request.steady and step == 1):
            return True
        return step in self._steps or step <= self._worst_of

    def _begin(self) -> None:
        step = self.n_steps + 1
        if not self._is_requested(step) and (step > 1 or self.on_oom is None):
            return
        try:
            recording = LoopRecording(self._model, self._optimizers, f"{self.where}, step {step}{rank_text()}")
            recording.__enter__()
        except Exception as error:  # another profiler, say: the loop goes on
            warnings.warn(f"Step {step} is not recorded. {message_of(error)}.", stacklevel=2)
            return
        self._recording = recording
        if self.on_oom is not None:
            self._listen()

    def _end(self, error: Exception | None) -> Measurement | None:
        """Ends the running step and returns its measurement; None if the step is not recorded."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        try:
            recording.__exit__(None if error is None else type(error), error, None)
            return recording.measurement
        except Exception as trouble:
            warnings.warn(f"Step {max(self.n_steps, 1)} is not recorded. {message_of(trouble)}.", stacklevel=2)
            return None
        finally:
            recording.close()

    def _broken(self, trouble: Exception) -> None:
        """Warns and closes the watch. The loop goes on."""
        self._warn(trouble)
        with suppress(Exception):
            self._close()

    def _warn(self, trouble: Exception) -> None:
        warnings.warn(f"{self.where} is not watched any more. {message_of(trouble)}.", stacklevel=2)

    def _record_of(self, error: Exception) -> Measurement:
        """The record of a refused step, or of the tensors in memory."""
        self._release_reserve()
        if (run := self._end(error)) is not None:
            return run
        where = f"{self.where}, step {self.n_steps + 1}{rank_text()}"
        device = LoopRecording(self._model, self._optimizers, where).device
        return memory_at_refusal(self._model, self._optimizers, device, where=where, error=error)


def _without_wrapper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # accelerate's wrapper
        optimizer = inner
    return optimizer


def _refusal(run: Measurement, whole: Measurement | None) -> tuple[str, ...]:
    """Sentences on a refusal, the held bytes first: a plan may need more memory, or a library, than there is."""
    from explorer.plan.planners.confirm import refusal

    try:
        return refusal(run, whole)
    except Exception as trouble:
        return (*refusal(run)[:1], f"No plan was made: {message_of(trouble)}")
