"""Who asked for it: notes block, operator, phase and role of every storage while a step runs.

The problem. An allocator tells how many bytes were taken and when, not for which block. Hooks on blocks tell which
block runs, but only in forward: in backward autograd calls operators from C++, and no block is entered at all.

The idea. A dispatch mode sees every operator below autograd, in forward, recompute and backward alike. For each it
notes when it ran, in which block and phase, which storages it returned, and its FLOPs. Nothing is summed here: totals
are the allocator's, see attribution.py.

The mechanism.
1. In forward and recompute the block is the innermost one on the stack that scopes.py keeps, a stack a thread.
2. In backward an operator belongs to the block whose forward made its autograd node. Nodes carry the number that
   autograd counted when they were made, so it is enough to note that counter whenever a block is entered or left:

       counter     0 ──────── 4 ─────────── 9 ──── 12        node number 6 in backward  ─▶  block 1
       block       embedding  │ block 1     │ head

3. The phase is what the step announced; a forward inside backward is a recompute.
4. A step of a small model runs thousands of operators in milliseconds, and a watcher that is slow changes what it
   watches: views cost one lookup, everything else is appended to flat columns, and is understood afterwards.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from explorer.engine.watch.calls import CallLog
from explorer.engine.watch.flops import formula
from explorer.engine.watch.in_place import ADD, references_of_the_last_holder, sum_of_gradients
from explorer.engine.watch.scopes import BlockScopes, Frame
from explorer.engine.watch.storages import NONE, KnownTensor, Storages
from explorer.engine.watch.uncompiled import DispatchMode, never_compiled
from explorer.engine.watch.uncounted import is_uncounted
from explorer.record.allocations import PHASES, Phase

FORWARD, RECOMPUTE, BACKWARD = (PHASES.index(phase) for phase in ("forward", "recompute", "backward"))
OP_COLUMNS = ("name", "block", "phase", "first_ns", "last_ns")
VIEW: tuple[int, Any] = (NONE, None)
"""An operator that returns its argument's storage: nothing is born, nothing is computed, nothing is noted."""
LIFT = torch.ops.aten.lift_fresh.default
"""A view by its schema, and the first that is seen of a tensor made from Python's numbers."""
CAST = torch.ops.aten._to_copy.default
NO_NUMBER = 2**62
"""Autograd gives AccumulateGrad the largest number there is: no block's forward made it."""
QUIET_NS = 5_000
"""Nothing is allocated this long on both sides of a phase border, so that two clocks cannot disagree about the side."""


class _Numbered(Frame):
    """A thread's frame that also knows which block made the autograd nodes of which numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first_node: list[int] = [0]
        self.block: list[int] = [0]
        self.calls: list[int] = []
        """Numbers in the CallLog of the blocks on the stack, NONE outside of forward."""


class Tracker(DispatchMode):
    """Watches between enter and exit; the columns stand afterwards, also after an exception.

    Operators are numbered in order; `ops` holds OP_COLUMNS of each, one after another: kernels empty the processor's
    caches between two operators, and five columns would be five places to fetch.
    """

    supports_higher_order_operators = True
    trouble: Exception | None = None
    """What the tracker itself raised, where a step is to go on without it; nothing is noted from then on."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        before_step: Iterable[KnownTensor] = (),
        *,
        segments: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.scopes = BlockScopes(model, self, segments=segments, new_frame=_Numbered)
        self.fqns = self.scopes.fqns
        self.op_names: list[str] = [""]
        self.uncounted: list[int] = []
        """Those of `op_names` whose FLOPs nobody has a formula for."""
        self.ops = array("q")
        self.casts: list[int] = []
        """Operators that made a copy of a parameter in another format: autocast keeps those until its context ends."""
        self.storages = Storages(device, self.scopes.index)
        self.scene_ns, self.scene_phase = array("q"), array("q")
        self.scene_rerun, self.scene_block = array("q"), array("q")
        self.borders: list[tuple[int, int]] = []
        """(phase, number of turns so far) at each announced border."""
        self.calls = CallLog()
        self.n_forward = [0] * len(self.fqns)
        self.n_recompute = [0] * len(self.fqns)
        self.flops: dict[tuple[int, int], int] = defaultdict(int)
        """By (phase, block), the block's own operators only."""
        self.begin_ns = self.end_ns = 0
        self._phase = FORWARD
        self._known_ops: dict[Any, tuple[int, Any]] = {}
        self._model = model
        self._before_step = list(before_step)
        self._open = ExitStack()
        self._main: Any = None
        self._outer_task: int | None = None

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.callback(self.storages.forget)
            references_of_the_last_holder()
            self.storages.tag(self._before_step)
            self.storages.n_before_step = len(self.storages.n_bytes)
            self._before_step.clear()  # or nothing that was there could ever die
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    hook = self._gradient(name.rpartition(".")[0])
                    opened.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            self._main = self.scopes.frame
            self._main.first_node[0] = torch._C._autograd._get_sequence_nr()
            opened.enter_context(self.scopes)
            self.begin_ns = time.time_ns()
            super().__enter__()
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.end_ns = time.time_ns()
        self._open.close()
        # Whoever keeps the columns must not keep the model: on CUDA it would lie in the next run's total.
        del self._model
        self.scopes.modules.clear()

    @never_compiled
    def on_phase(self, phase: Phase) -> None:
        """The step crosses a border; see `step.OnPhase`."""
        _wait()
        self._phase = PHASES.index(phase)
        self._outer_task = None
        self.borders.append((self._phase, len(self.storages.turns)))
        self._scene(self.scopes.frame)
        _wait()

    def entered(self, block: int, frame: Any, inputs: Any) -> None:
        phase = self._phase_of(frame)
        counts = self.n_recompute if phase == RECOMPUTE else self.n_forward
        counts[block] += 1
        frame.calls.append(self.calls.begin(block, self.storages.of(inputs)) if phase == FORWARD else NONE)
        self._scene(frame)

    def left(self, block: int, frame: Any, output: Any) -> None:
        call = frame.calls.pop()
        if call != NONE:
            self.calls.end(call, self.storages.of(output))
        self._scene(frame)

    def rerun_changed(self, frame: Frame) -> None:
        self._scene(frame)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, out = kwargs or {}, None
        try:
            known = VIEW if self.trouble else self._known_ops.get(func) or self._learn(func)
            # Rule 4: a view makes no storage and computes nothing.
            if known is not VIEW:
                frame: Any = self.scopes.frame
                phase = self._phase_of(frame)
                first_ns = time.time_ns()
                # Unwatched, autograd adds gradients in place where it can; watched it never does: see in_place.py.
                out = sum_of_gradients(args, kwargs) if func is ADD and phase == BACKWARD else None
        except Exception as error:
            self._failed(error)
            known = VIEW
        if out is None:
            out = func(*args, **kwargs)
        if known is VIEW:
            return out
        last_ns = time.time_ns()
        try:
            # Rules 1 and 2.
            block = frame.stack[-1] if phase != BACKWARD else self._block_of_node(frame)
            name, count = known
            if count is not None:
                self.flops[phase, block] += count(*args, **kwargs, out_val=out)
            if func is CAST and args[0].is_leaf and args[0].requires_grad:
                self.casts.append(len(self.ops) // len(OP_COLUMNS))
            self.ops.extend((name, block, phase, first_ns, last_ns))
            self.storages.see_all(out, len(self.ops) // len(OP_COLUMNS) - 1)
        except Exception as error:
            self._failed(error)
        return out

    def _failed(self, error: Exception) -> None:
        """The tracker itself raised, not the operator."""
        raise error

    def _learn(self, func: Any) -> tuple[int, Any]:
        """Number and formula of an operator met for the first time, or VIEW."""
        if getattr(func, "is_view", False) and func is not LIFT:
            known = VIEW
        else:
            known = (len(self.op_names), formula(func))
            if is_uncounted(func):
                self.uncounted.append(known[0])
            self.op_names.append(str(func))
        self._known_ops[func] = known
        return known

    def _phase_of(self, frame: Frame) -> int:
        """A forward inside backward is a recompute, also where a model checkpoints on its own and opens no scope."""
        if frame.reruns or (self._phase == BACKWARD and len(frame.stack) > 1):
            return RECOMPUTE
        return self._phase

    def _block_of_node(self, frame: _Numbered) -> int:
        """Block whose forward made the autograd node that runs now; 0 where there is none or nobody can say."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else NO_NUMBER
        if number >= NO_NUMBER:
            return 0
        task = torch._C._current_graph_task_id()
        if self._outer_task is None:
            self._outer_task = task
        # On CUDA a recompute numbers its nodes in the autograd thread. Only reentrant checkpointing runs backward
        # through such nodes, in a graph task of its own.
        source: Any = frame if task != self._outer_task else self._main
        return int(source.block[max(0, bisect_right(source.first_node, number) - 1)])

    def _gradient(self, owner: str) -> Any:
        return lambda parameter: self._gradient_came(parameter, owner)

    def _gradient_came(self, parameter: torch.Tensor, owner: str) -> None:
        if parameter.grad is not None:
            self.storages.tag([KnownTensor(parameter.grad, "gradient", owner)])

    def _scene(self, frame: Any) -> None:
        """Notes what runs from now on: phase, block that runs again, innermost block, autograd's counter."""
        phase = self._phase_of(frame)
        rerun = NONE
        if phase == RECOMPUTE:
            rerun = frame.reruns[-1] if frame.reruns else frame.stack[1]
        self.scene_ns.append(time.time_ns())
        self.scene_phase.append(phase)
        self.scene_rerun.append(rerun)
        self.scene_block.append(frame.stack[-1])
        frame.first_node.append(torch._C._autograd._get_sequence_nr())
        frame.block.append(frame.stack[-1])


def _wait() -> None:
    end_ns = time.time_ns() + QUIET_NS
    while time.time_ns() < end_ns:
        pass
