"""Recording of one step of a user's loop, with both instruments.

    with ...:      zero_grad │ forward │ backward │ clip │ optimizer │ scheduler
    phase          between   │ forward │ backward │ between │ optimizer │ between

The loop announces no phases, so hooks find the borders: a call of the model, the begin and end of backward, and a step
of an optimizer (torch's global hooks). Everything else is `between`. The user's state does not change: hooks are
removed, no random number is drawn, no gradient is touched, and an exception reaches the user.

Compiled code runs compiled, because as written it would compute other bits. torch would trace hooks into it, so at its
first call the tracker steps aside: its hooks go, and from there on the allocator alone records. A compiled function
that is no module may hold a whole step, whose phases are then unknown too.
"""

from __future__ import annotations

import atexit
import gc
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import time_ns
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointError

from explorer.engine.bench.memory import (
    Optimizers,
    each_optimizer,
    storage_bytes,
    tensors_before_step,
    tensors_beside,
    unwatched_parameters,
)
from explorer.engine.bench.recorded_graph import recorded_graph
from explorer.engine.bench.recording import Recording
from explorer.engine.bench.step import segment_heads
from explorer.engine.device.device import Device, current_rank, device_of, device_of_model
from explorer.engine.policy.apply import policy_of
from explorer.engine.state.reachable import instances_in_memory
from explorer.engine.state.snapshot import optimizers_of
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.engine.watch.modes import before_compiled, is_call_of_module, never_compiled
from explorer.engine.watch.scopes import after_closure, around_backward
from explorer.engine.watch.storages import KnownTensor, lies_on
from explorer.engine.watch.tracker import Tracker
from explorer.engine.watch.zero_grad import around_zero_grad
from explorer.errors import BadInput
from explorer.record.allocations import PHASES, Allocations, PhaseSpan
from explorer.record.graph import RECORDED, Autocast, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import Optimizer, RunSpec

BETWEEN, OPTIMIZER = PHASES.index("between"), PHASES.index("optimizer")


class _LoopTracker(Tracker):
    """A tracker in which the first call of the model begins the forward phase."""

    raises_trouble = False
    autocast: Autocast = "none"
    """Autocast at the call of the model."""
    saw_compiled = False
    """Whether compiled code ran."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for owner, names in ((self.scopes, ("_before", "_after", "_rerun")), (self, ("on_phase", "_gradient_came"))):
            for name in names:
                setattr(owner, name, self._safely(getattr(owner, name)))

    def _safely(self, function: Callable[..., object]) -> Callable[..., None]:
        @never_compiled
        def noted(*args: object, **kwargs: object) -> None:
            try:
                if self.trouble is None:
                    function(*args, **kwargs)
            except Exception as error:
                self._failed(error)

        return noted

    def meet_compiled(self) -> None:
        """Removes the hooks of all modules and notes nothing more, apart from phases."""
        self.saw_compiled = self.is_aside = True
        self.scopes.close()
        frame = self.scopes.frame  # no hook will leave the blocks that run now: later bytes would count as theirs
        frame.stack[1:], frame.reruns = [], []
        self.on_phase("forward" if self._phase in (BETWEEN, OPTIMIZER) else PHASES[self._phase])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a step may begin inside a compiled region, whose other frames stay unmarked (see scopes.py)."""
        return True

    def entered(self, block: int, frame: Any, inputs: Any) -> None:
        if self._phase in (BETWEEN, OPTIMIZER) and not frame.reruns:
            self.on_phase("forward")
            self.autocast = _autocast()
        super().entered(block, frame, inputs)


class LoopRecording:
    """Records between enter and exit and then sets `measurement`, also after an exception. The exception passes."""

    measurement: Measurement

    def __init__(self, model: nn.Module, optimizers: Optimizers, where: str, *, notes_saved: bool = False) -> None:
        """Raises BadInput for a model on another device than cpu or cuda, and for what is no optimizer."""
        self._model, self._where, self._notes_saved = model, where, notes_saved
        self.optimizers = each_optimizer(optimizers)
        """Optimizers of the loop. Those that hold parameters of the model, or step during the record, join them."""
        self.device: Device = device_of(device_of_model(model))
        self._zero_grad: tuple[int, bool] | None = None
        """Time of the last call of zero_grad in ns, and whether it drops gradients."""
        self._open, self._borders = ExitStack(), ExitStack()
        self._runs_as_written = False
        """Whether a compiled function ran as written, because the caller had switched the compiler off."""

    def __enter__(self) -> None:
        """Starts the recording. Raises BadInput if another instrument is on: each would record the other."""
        _refuse_other_instruments()
        in_memory = instances_in_memory(torch.Tensor, torch.optim.Optimizer)  # one search: it takes most of the enter
        for optimizer in optimizers_of(self._model, in_memory):
            self._join(optimizer)
        self._policy = policy_of(self._model)
        # Other tensors of Python on the device than the model's and the optimizer's count as input.
        before = [*tensors_before_step(self._model, self.optimizers, ()), *tensors_beside(self._model, in_memory)]
        inputs = [KnownTensor(thing, "input", "") for thing in in_memory if lies_on(thing, self.device.torch)]
        # A view of a parameter is the result of an operator too, and holds nothing beside the parameter.
        results = [named for named in inputs if isinstance(named.tensor, torch.Tensor) and not named.tensor.is_leaf]
        known_bytes = storage_bytes(before, self.device.torch)
        self._left_bytes = storage_bytes([*before, *results], self.device.torch) - known_bytes
        before += inputs
        segments = segment_heads(self._policy)
        self._tracker = _LoopTracker(self._model, self.device.torch, before, segments=segments)
        self._recording = Recording(self._model, self._tracker, self.device)
        if self._notes_saved:
            from explorer.engine.watch.saved_tensors import SavedTensors  # few steps need it

            self._recording.saved = SavedTensors(self._tracker)
        with ExitStack() as opened:
            opened.enter_context(before_compiled(self._step_aside))
            self._texts = opened.enter_context(_shown_warnings())
            opened.enter_context(self._recording)
            opened.callback(lambda: setattr(self._recording, "optimizers", self.optimizers))
            self._tracker.on_phase("between")
            opened.callback(self._borders.close)  # first: one of the next two may raise
            self._borders.enter_context(_borders(self._tracker, self._join))
            self._borders.enter_context(around_zero_grad(self._zeroed))
            self._open = opened.pop_all()
        atexit.register(self._open.close)  # a profiler that is still on when the interpreter ends crashes it

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close()
        if self._tracker.trouble is not None:
            raise self._tracker.trouble
        spec = self._spec(self._recording.attribution.phases)
        run = self._recording.measurement(spec)
        rank, n_ranks = current_rank() or (None, None)
        failure = failure_in_words(error, self._model) if isinstance(error, Exception) else None
        failure = failure and self._recording.with_exact_bytes(failure)
        if isinstance(error, CheckpointError) and failure is not None:
            error.add_note(failure.sentence)
        self.measurement = replace(
            run,
            origin="recorded",
            recorded_in=self._where,
            rank=rank,
            n_ranks=n_ranks,
            graph=recorded_graph(self._model, self._tracker, run.blocks, spec.model),
            warnings=tuple(dict.fromkeys([*self._texts, *run.warnings, *_outer_buckets(self._model)])),
            unwatched_parameter_bytes=storage_bytes(
                unwatched_parameters(self._model, self.optimizers), self.device.torch
            ),
            left_bytes=self._left_bytes,
            zero_grad_tick=self._zero_grad_tick(run.allocations),
            keeps_gradients=self._zero_grad is not None and not self._zero_grad[1],
            ran_as_written=self._runs_as_written,
            ran_compiled=self._tracker.saw_compiled,
            failure=failure,
            free_memory_bytes=self.device.free_bytes(),
        )

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)

    def _zeroed(self, set_to_none: bool) -> None:
        self._zero_grad = time_ns(), set_to_none

    def _zero_grad_tick(self, log: Allocations | None) -> int | None:
        if self._zero_grad is None or log is None:
            return None
        return max(0, bisect_right(log.time_ns, self._zero_grad[0] - self._tracker.begin_ns) - 1)

    @never_compiled
    def _step_aside(self, function: object, compiled: bool) -> None:
        """A compiled function is called next."""
        if not compiled:
            self._runs_as_written = True
            return
        self._tracker.meet_compiled()
        if not is_call_of_module(function):
            self._borders.close()

    def close(self) -> None:
        """Removes all instruments."""
        atexit.unregister(self._open.close)
        self._open.close()

    def _spec(self, phases: Sequence[PhaseSpan]) -> RunSpec:
        n_backwards = sum(span.phase == "forward" for span in phases)
        kind = type(self.optimizers[0] if self.optimizers else None).__name__.lower()
        by_class: dict[str, Optimizer] = {"adamw": "adamw", "sgd": "sgd"}
        optimizer = by_class.get(kind, "none")
        return RunSpec(
            model=ModelRef(target=f"{RECORDED}{self._where}"),
            policy=self._policy,
            autocast=self._tracker.autocast,
            device="cuda" if self.device.torch.type == "cuda" else "cpu",
            optimizer=optimizer,
            mode="train" if self._model.training else "eval",
            n_accumulation=max(n_backwards, 1),
            n_repeats=0,
            n_threads=torch.get_num_threads(),
        )


@contextmanager
def _borders(tracker: _LoopTracker, stepping: Callable[[Any], object]) -> Iterator[None]:
    """Announces the phases backward and optimizer at their begin, and `between` at their end.

    `stepping` gets each optimizer that begins a step.
    """

    @never_compiled
    def steps(optimizer: object, args: Any, kwargs: Any) -> Any:
        stepping(optimizer)
        # With a closure, forward and backward run inside the optimizer's step, as in Lightning.
        new = after_closure(args, kwargs, partial(tracker.on_phase, "optimizer"))
        if new is None:
            tracker.on_phase("optimizer")
        return new

    @never_compiled
    def ended(*_: object) -> None:  # an optimizer may step inside backward
        tracker.on_phase("between" if torch._C._current_graph_task_id() == -1 else "backward")

    backward, between = partial(tracker.on_phase, "backward"), partial(tracker.on_phase, "between")
    before, after = register_optimizer_step_pre_hook(steps), register_optimizer_step_post_hook(ended)
    with before, after, around_backward(backward, between, in_forward=lambda: tracker.scopes.is_in_block):
        yield


@contextmanager
def _shown_warnings() -> Iterator[list[str]]:
    """Collects the warnings shown in the context. The user's filters and display stay in force."""
    warned: list[str] = []
    show = warnings.showwarning

    def showwarning(message: Warning | str, *rest: Any, **named: Any) -> None:
        warned.append(str(message))
        show(message, *rest, **named)

    warnings.showwarning = showwarning  # type: ignore[assignment]
    try:
        yield warned
    finally:
        warnings.showwarning = show


def _outer_buckets(model: nn.Module) -> Iterator[str]:
    """A sentence on the buckets of a DistributedDataParallel around `model`."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        wrappers = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
        if any(part is model for wrapper in wrappers if wrapper is not model for part in wrapper.modules()):
            from explorer.plan.why.caveats import DDP_BUCKETS

            yield DDP_BUCKETS


def _refuse_other_instruments() -> None:
    running = []
    if torch._C._autograd._profiler_enabled():
        running.append("a profiler is running, or another step is being recorded")
    if (mode := _get_current_dispatch_mode()) is not None:
        running.append(f"the dispatch mode {type(mode).__name__} is on")
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
        running.append("CUDA's memory history is being recorded")
    if running:
        raise BadInput(
            f"A step cannot be recorded here: {' and '.join(running)}.",
            hint="Record outside of it; both would record each other.",
        )


def _autocast() -> Autocast:
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    if kind is None:
        return "none"
    return "float16" if torch.get_autocast_dtype(kind) is torch.float16 else "bfloat16"
