"""Notes block, operator, phase and role of every storage while a step runs.

The problem. An allocator records how many bytes were taken and when, but not the block. Hooks show the running block
only in forward: in backward autograd calls operators from C++ and enters no block.

The idea. A dispatch mode sees every operator below autograd, in forward, recompute and backward alike. The mode notes
the operator's time, block, phase, returned storages and FLOPs. No bytes are summed here: totals come from the
allocator, see attribution.py.

The mechanism.
1. In forward and recompute the block is the innermost on the stack that scopes.py keeps for each thread. Outside of
   all blocks below the root, the line of the user's code is noted too (lines.py).
2. In backward an operator belongs to the block and line whose forward made its autograd node. A node carries the value
   of autograd's counter at its creation, so the tracker notes the counter whenever a block is entered or left:

       counter     0 ──────── 4 ─────────── 9 ──── 12        node number 6 in backward  ─▶  block 1
       block       embedding  │ block 1     │ head

3. The step announces its phase; a forward inside backward is a recompute.
4. A step of a small model runs thousands of operators in milliseconds, and a slow watcher would change the step. Views
   therefore cost one lookup; other operators and storages are appended to flat lists and analysed afterwards. A look
   at the clock costs as much as ten lookups among kernels, so one look dates all that happens at a moment.
5. Autograd writes some gradients in place, and never does under a dispatch mode: see gradient_sums.py.
6. A DTensor is passed on: its operators on shards, and the collectives between them, come here by themselves.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from time import time_ns
from typing import Any, Self

import torch
from torch import nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload

from explorer.engine.watch.collectives import (
    buffer_role,
    dtensor_type,
    group_size,
    is_distributed,
    kind_of,
    payload_bytes,
    unit_now,
    watching_resizes,
)
from explorer.engine.watch.flops import formula, lacks_formula
from explorer.engine.watch.gradient_sums import IN_PLACE, in_place, references_of_the_last_holder
from explorer.engine.watch.lines import Lines
from explorer.engine.watch.modes import draws_numbers, is_in_place, is_noted, never_compiled
from explorer.engine.watch.scopes import BlockWatch, Frame
from explorer.engine.watch.storages import META, NONE, CallLog, KnownTensor, Storages
from explorer.record.allocations import PHASES, CollectiveKind, Phase
from explorer.record.failure import is_out_of_memory

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = map(PHASES.index, ("forward", "recompute", "backward", "optimizer"))
OP_COLUMNS = ("name", "block", "phase", "first_ns", "last_ns", "line")
VIEW: tuple[int, Any, bool] = (NONE, None, True)
"""An operator that returns its argument's storage: no storage is born, nothing is computed or noted."""
LIFT = torch.ops.aten.lift_fresh.default
"""A view by its schema, but the first operator on a tensor made from Python numbers."""
CAST = torch.ops.aten._to_copy.default
CHUNKS = "fsdp.chunk_cat.default"
"""Copies gradients of whole parameters into the buffer of a reduce-scatter."""
NO_NUMBER = 2**62
"""Autograd gives AccumulateGrad the largest number: no block's forward made the node."""
QUIET_NS = 5_000
"""Time without allocations on both sides of a phase border, so that two clocks cannot disagree about the side."""


class _Numbered(Frame):
    """A thread's frame that also maps numbers of autograd nodes to blocks and lines."""

    def __init__(self) -> None:
        super().__init__()
        self.first_node: list[int] = [0]
        self.block: list[int] = [0]
        self.line: list[int] = [0]
        self.next_node = 0
        """Autograd's counter at the last entry of the lists."""
        self.calls: list[int] = []
        """CallLog numbers of the blocks on the stack, NONE outside of forward."""

    def note(self, first_node: int, block: int, line: int) -> None:
        self.first_node.append(first_node)
        self.block.append(block)
        self.line.append(line)


class Tracker(BlockWatch):
    """Watches a step between enter and exit; the columns are complete afterwards, also after an exception.

    Operators are numbered in order, and `ops` holds the OP_COLUMNS of each in sequence. Kernels empty the processor's
    caches between two operators, so five separate columns would cost five memory accesses. While the step runs, the
    numbers stand in a list, which takes five in a third of an array's time.
    """

    selects_itself = True
    trouble: Exception | None = None
    """First error of the tracker itself; nothing is noted after it, and the step goes on."""
    is_aside = False
    """Whether the tracker notes nothing more: an error, or compiled code, whose kernels it would change."""
    raises_trouble = True
    """Whether the exit raises the error. Not earlier, because torch may call from C++."""
    refused_in = ""
    """Operator and block of the last request for memory that was refused, as part of a sentence."""
    with_gradient: set[str]
    """Names of the parameters whose gradient came in the step."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        before_step: Iterable[KnownTensor] = (),
        *,
        segments: Collection[str] = (),
    ) -> None:
        super().__init__(model, segments=segments, new_frame=_Numbered)
        self.fqns = self.scopes.fqns
        self._local = self.scopes.local
        self.op_names: list[str] = [""]
        self.uncounted, self.draws = list[int](), set[int]()
        """Indices into `op_names` of operators without a formula for FLOPs, and of those that draw random numbers."""
        self.ops, self._rows = array("q"), list[int]()
        self.casts: list[int] = []
        """Operators that cast a parameter: autocast keeps the casts until its context ends."""
        self.storages = Storages(device, self.scopes.index)
        self.scenes: list[int] = []
        """Time, phase, recomputed block and innermost block of each change, in sequence."""
        self.borders: list[tuple[int, int]] = []
        """(phase, number of turns so far) at each announced border."""
        self.calls, self.lines = CallLog(), Lines()
        self.n_forward, self.n_recompute = ([0] * len(self.fqns) for _ in range(2))
        self.flops: dict[tuple[int, int], int] = defaultdict(int)
        """FLOPs by (phase, block), of the block's own operators only."""
        self.begin_ns = self.end_ns = 0
        self.collectives: list[tuple[CollectiveKind, int, int, int, int, int]] = []
        """(kind, bytes, ranks, block, phase, time in ns) of each collective."""
        self._kinds: dict[int, CollectiveKind] = {}
        """Kind of each operator that is a collective, by number."""
        self._distributed = False
        self._dtensor = dtensor_type()
        self._phase = FORWARD
        self._operators: dict[int, tuple[int, Any, bool]] = {}
        """Number, formula and `is_in_place` by the operator's identity."""
        self._func_objects: list[object] = []
        """The operators, so that no identity is given away."""
        self._model = model
        self._before_step = list(before_step)
        self._device = device
        self._numbers = {module: i for i, module in enumerate(self.scopes.modules.values())}
        self._open = ExitStack()
        self._main: Any = None
        self._outer_task: int | None = None

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.callback(self.storages.forget)
            references_of_the_last_holder()
            self.storages.tag(self._before_step)
            self.storages.n_before_step = self.storages.n_seen
            self.with_gradient = set()
            weights = {thing.tensor: "" for thing in self._before_step if thing.role == "parameter"}
            weights |= {parameter: name for name, parameter in self._model.named_parameters()}
            for weight, name in weights.items():
                if isinstance(weight, torch.Tensor) and weight.is_leaf and weight.requires_grad:
                    hook = partial(self._gradient_came, name)
                    opened.enter_context(weight.register_post_accumulate_grad_hook(hook))
            weights.clear()
            self._before_step.clear()  # else no older storage could die
            self._distributed = is_distributed()
            if self._distributed:
                opened.enter_context(watching_resizes(self._resized))
            self._main = self.scopes.frame
            self._main.first_node[0] = self._main.next_node = _get_sequence_nr()
            super().__enter__()
            self.begin_ns = time_ns()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.end_ns = time_ns()
        with self._open:  # closes also if an exit raises
            super().__exit__(*exc)
        self.ops = array("q", self._rows)
        self._rows.clear()
        # A caller that keeps the columns must not keep the model: on CUDA it would count in the next run's total.
        del self._model
        self._numbers.clear()
        self.scopes.modules.clear()
        if self.raises_trouble and self.trouble is not None and exc[0] is None:
            raise self.trouble

    @never_compiled
    def on_phase(self, phase: Phase) -> None:
        """The step crosses a border; see `step.OnPhase`."""
        _wait()
        self._phase = PHASES.index(phase)
        self._outer_task = None
        self.borders.append((self._phase, self.storages.n_turns))
        self._scene(self.scopes.frame)
        _wait()

    def entered(self, block: int, frame: Any, inputs: object) -> None:
        now_ns, phase = self._scene(frame)
        counts = self.n_recompute if phase == RECOMPUTE else self.n_forward
        counts[block] += 1
        if phase != FORWARD:
            frame.calls.append(NONE)
            return
        line = 0 if block else self.lines.number(sys._getframe(1))
        frame.calls.append(self.calls.begin(block, self.storages.of(inputs), now_ns, line))

    def left(self, block: int, frame: Any, output: object) -> None:
        now_ns, _ = self._scene(frame)
        call = frame.calls.pop()
        if call != NONE:
            self.calls.end(call, self.storages.of(output), now_ns)

    def rerun_changed(self, frame: Frame) -> None:
        self._scene(frame)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if self._dtensor in types:  # Rule 6.
            return NotImplemented
        operator = self._operators.get(id(func))  # by identity: torch computes an operator's hash in Python
        if operator is VIEW:  # Rule 4: a view makes no storage and computes nothing.
            if self._phase == FORWARD and self._local.frame.stack[-1] == 0:
                self._line_now()
            return func._op(*args, **kwargs or {})
        kwargs, out = kwargs or {}, None
        try:
            operator = VIEW if self.is_aside else operator or self._learn(func)
            if operator is not VIEW:
                frame: Any = self._local.frame
                phase = self._phase_of(frame)
                first_ns = time_ns()
                if phase == BACKWARD and id(func) in IN_PLACE:  # Rule 5.
                    out = in_place(func, args, kwargs)
        except Exception as error:
            self._failed(error)
            operator = VIEW
        if out is None:
            try:
                out = (func._op if type(func) is OpOverload else func)(*args, **kwargs)  # without a frame of Python
            except Exception as error:
                self._failed_in(func, error)
                raise
        if operator is VIEW:
            return out
        last_ns = time_ns()
        try:
            (block, line), first = self._place(frame, phase), self.storages.n_seen
            name, count, is_in_place_form = operator
            self._rows += (name, block, phase, first_ns, last_ns, line)
            if count is not None:
                self.flops[phase, block] += count(*args, **kwargs, out_val=out)
            if not is_in_place_form:
                number = len(self._rows) // len(OP_COLUMNS) - 1
                self.storages.see_results((func, args, kwargs, out), number, last_ns)
                if func is CAST and args[0].is_leaf and args[0].requires_grad:
                    self.casts.append(number)
            if self._distributed:
                self._note_distributed(first, (name, block, phase, last_ns), (args, kwargs, out))
        except Exception as error:
            self._failed(error)
        return out

    def _note_distributed(self, first: int, row: tuple[int, int, int, int], call: tuple[Any, Any, object]) -> None:
        """Notes a collective. Names gradients before a reduction, and storages since `first` of FSDP2 or DDP."""
        (operator, block, phase, last_ns), (args, kwargs, out) = row, call
        if operator in self._kinds:
            counted = (payload_bytes(args, out), group_size((*args, *kwargs.values())))
            self.collectives.append((self._kinds[operator], *counted, self._unit(block), phase, last_ns))
        if self.storages.n_seen > first and (role := buffer_role(getattr(out, "dtype", None))) is not None:
            self.storages.name_since(first, role, self._unit(block))
        if self.op_names[operator] == CHUNKS:
            owner = self.fqns[self._unit(block)]
            self.storages.tag(KnownTensor(gradient, "gradient", owner) for gradient in args[0])

    def _unit(self, block: int) -> int:
        """Number of the unit that FSDP2 works on, else `block`."""
        unit = unit_now()
        return block if unit is None else self._numbers.get(unit, block)

    @never_compiled
    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage took or freed its memory outside of any operator."""
        try:
            if self.trouble or storage.device not in (self._device, META):
                return
            first = self.storages.n_seen
            self.storages.see(storage, NONE)
            if self.storages.n_seen > first:
                role = buffer_role() or "temporary"
                self.storages.name_since(first, role, self._unit(self.scopes.frame.stack[-1]))
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Keeps the first error of the tracker itself, not of the operator."""
        self.trouble, self.is_aside = self.trouble or error, True

    def _learn(self, func: Any) -> tuple[int, Any, bool]:
        """Number and formula of a new operator, and whether it returns the storages that it writes; or VIEW."""
        if not is_noted(func) or (getattr(func, "is_view", False) and func is not LIFT):
            operator = VIEW
            if self._phase == FORWARD and self._local.frame.stack[-1] == 0:  # later calls do not come here
                self._line_now()
        else:
            operator = (len(self.op_names), formula(func), is_in_place(func))
            if lacks_formula(func):
                self.uncounted.append(operator[0])
            if (kind := kind_of(func)) is not None:
                self._kinds[operator[0]] = kind
            if draws_numbers(func):
                self.draws.add(operator[0])
            self.op_names.append(str(func))
        self._operators[id(func)] = operator
        self._func_objects.append(func)
        return operator

    def _phase_of(self, frame: Frame) -> int:
        """The phase now. A forward inside backward is a recompute, also if a model's own checkpoint opens no scope."""
        if frame.reruns or (self._phase == BACKWARD and len(frame.stack) > 1):
            return RECOMPUTE
        return self._phase

    def _failed_in(self, operator: object, error: Exception) -> None:
        with suppress(Exception):  # the error of the step is the one that is raised
            if is_out_of_memory(error):
                frame: Any = self._local.frame
                block, line = self._place(frame, self._phase_of(frame))
                place = self.fqns[block] or self.lines.texts[line] or f"the {PHASES[self._phase]}"
                self.refused_in = f" in {operator} of {place}"

    def _place(self, frame: _Numbered, phase: int) -> tuple[int, int]:
        """Block and line of an operator by rules 1 and 2."""
        if phase == BACKWARD:
            return self._of_node(frame)
        block = frame.stack[-1]
        return block, 0 if block or phase == OPTIMIZER else self._line_now()

    def _line_now(self) -> int:
        """Number of the line that runs an operator outside of all modules below the root; notes its autograd nodes."""
        line, next_node = self.lines.number(sys._getframe(1)), _get_sequence_nr()
        frame: Any = self._local.frame
        if next_node > frame.next_node:
            frame.note(frame.next_node, 0, line)
            frame.next_node = next_node
        return line

    def _of_node(self, frame: _Numbered) -> tuple[int, int]:
        """Block and line that made the running autograd node in forward; zeros if no node runs or it is unknown."""
        node = _current_autograd_node()
        number = node._sequence_nr() if node is not None else NO_NUMBER
        if number >= NO_NUMBER:
            return 0, 0
        if self._outer_task is None:
            self._outer_task = _current_graph_task_id()
        # On CUDA a recompute numbers its nodes in the autograd thread. Only reentrant checkpointing runs backward
        # through such nodes, in a separate graph task.
        if frame is not self._main and _current_graph_task_id() == self._outer_task:
            frame = self._main
        at = max(0, bisect_right(frame.first_node, number) - 1)
        return frame.block[at], frame.line[at]

    def _gradient_came(self, name: str, parameter: torch.Tensor) -> None:
        """`name` is empty for a weight of another model."""
        self.with_gradient.add(name)
        if parameter.grad is not None:
            self.storages.tag_tensor(parameter.grad, "gradient", name.rpartition(".")[0])

    def _scene(self, frame: Any) -> tuple[int, int]:
        """Notes time, phase, recomputed block, innermost block and autograd's counter; returns the first two."""
        now_ns, phase = time_ns(), self._phase_of(frame)
        rerun = NONE
        if phase == RECOMPUTE:
            rerun = frame.reruns[-1] if frame.reruns else frame.stack[1]
        self.scenes += (now_ns, phase, rerun, frame.stack[-1])
        frame.next_node = _get_sequence_nr()
        frame.note(frame.next_node, frame.stack[-1], 0)
        return now_ns, phase


def _wait() -> None:
    end_ns = time_ns() + QUIET_NS
    while time_ns() < end_ns:
        pass
