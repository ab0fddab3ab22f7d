"""The action list in one process: ranks take turns, and every action is real forward or backward work.

Also some ranks alone, for the prices of single stages: with the boundary tensors of an earlier run played back, rank r
of R runs as if the others were there. Time is read without the allocator's recording, memory with it: two passes over
the same actions.

Autograd's graph ends at the border of a stage, because the next stage computes on another rank. So the chain rule
crosses the border by hand: each received tensor is a leaf of the stage's graph. Backward from the outputs fills the
leaf's `.grad`, and the previous stage waits for this gradient.

    received ─▶ [buffer, a leaf] ─▶ stage ─▶ outputs ─▶ sent          F
    sent back ◀─ [leaf.grad] ◀──── stage ◀─ [buffer] ◀─ received      B, or I now and W later

1. Buffers for all received tensors are taken before the first action and kept to the end, as in torch 2.13. Memory by
   rank would be wrong without these buffers.
2. F stores roots and leaves of its microbatch ("in flight"): several forwards may run before the first backward.
3. B takes roots and leaves, and fills the gradients of parameters and leaves. I fills the gradients of the leaves
   only, for which another rank waits, and owes W the rest. A zero-bubble schedule fills gaps in this way.
4. Sent tensors are held as long as torch holds them (torch 2.13, schedules.py, confirmed against real ranks over gloo,
   to the byte). GPipe and the runtime keep the handles of all sends to the end of the step. 1F1B keeps its last sent
   gradient until the next send, and the output of its last warm-up send but one until the drain begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from explorer.engine.device.device import WallClock, device_of
from explorer.engine.state.rng import seed_everything
from explorer.pipeline.engine.build import Pipeline
from explorer.pipeline.engine.microbatches import deferred_batch_norm
from explorer.pipeline.engine.pass_readings import MemoryWatch, PassReadings
from explorer.pipeline.engine.tape import Meta
from explorer.pipeline.engine.torch_adapter import backward_input, backward_weight
from explorer.pipeline.plan.actions import Action, execution_order
from explorer.pipeline.plan.schedules import runs_1f1b
from explorer.pipeline.record.step import ActionTime, RankMemory
from explorer.record.plan import Progress, Report, silent

Tensors = tuple[Tensor | None, ...]
Mail = dict[tuple[int, str, int], Tensors]
"""By receiving stage, kind ("F" or "B") and microbatch: boundary tensors, or their gradients."""


@dataclass
class Trace:
    """Results of one pass over an action list."""

    readings: PassReadings
    ranks: Collection[int]
    mail: Mail = field(default_factory=dict)
    """All tensors that crossed a boundary, on the CPU; empty without `keep_mail`."""
    actions: tuple[ActionTime, ...] = ()
    """On the clock of this process: one after another."""
    losses: dict[int, float] = field(default_factory=dict)
    loss_bytes: int = 0
    """Bytes kept by the loss of one microbatch until the step ends: torch's mean may hold its input's storage."""

    def memory(self, times: tuple[ActionTime, ...] | None = None) -> tuple[RankMemory, ...]:
        """Bytes of the ranks that ran, with `times` (default: of this pass) as the axis. Empty if not recorded."""
        return self.readings.memory(self.ranks, self.actions if times is None else times)


def run_pass(
    pipeline: Pipeline,
    *,
    alone: tuple[Collection[int], Mail] | None = None,
    keep_mail: bool = False,
    memory: bool = False,
    report: Report = silent,
) -> Trace:
    """Runs all actions, or the actions of some ranks alone with recorded mail in place of the other ranks.

    Parameters' gradients start as None and hold the sums over microbatches afterwards. Errors of the model pass
    through, and `pipeline.under_way` is then the failed action. `report` is called for every action.
    """
    ranks, mail = alone or (range(len(pipeline.rows)), {})
    order = [action for action in execution_order(pipeline.rows) if pipeline.rank_of[action.stage] in ranks]
    runners = {action.stage: StageRunner(pipeline, action.stage) for action in order}
    pipeline.reset(set(runners))
    if not pipeline.plan.keyed_rng:
        seed_everything(pipeline.spec.seed)
    device = device_of(pipeline.trainee.device)
    watch, clock = (MemoryWatch(device), WallClock()) if memory else (None, device.clock())
    trace = Trace(PassReadings(pipeline, clock, watch), ranks)
    statistics = deferred_batch_norm(pipeline.trainee.model, enabled=pipeline.plan.deferred_batch_norm)
    with trace.readings.recording(), statistics:
        _Pass(pipeline, runners, trace, mail, keep_mail).run(order, report)
    losses = {i: loss.detach() for runner in runners.values() for i, loss in sorted(runner.losses.items())}
    trace.losses = {i: float(loss) for i, loss in losses.items()}
    trace.loss_bytes = max((loss.untyped_storage().nbytes() for loss in losses.values()), default=0)
    return trace


@dataclass
class _Pass:
    pipeline: Pipeline
    runners: dict[int, StageRunner]
    trace: Trace
    mail: Mail
    keep_mail: bool

    def run(self, order: list[Action], report: Report) -> None:
        readings, pipeline = self.trace.readings, self.pipeline
        handles = SendHandles(runs_1f1b(pipeline.plan), len(pipeline.parts), pipeline.n_microbatches)
        for stage, runner in self.runners.items():
            with readings.outside(pipeline.rank_of[stage], "receive buffers"):
                runner.take_buffers()
        zero = readings.clock.mark()
        for n_done, action in enumerate(order):
            report(Progress(what=f"action {action}", done=n_done, total=len(order)))
            pipeline.under_way = action
            self._receive_recorded(action)
            with readings.action(action):
                sent = self.runners[action.stage].do(action)
            if self._deliver(action, sent):
                handles.after(action, sent)
            del sent
        readings.clock.settle()
        pipeline.under_way = None
        self.trace.actions = readings.times(zero)

    def _deliver(self, action: Action, sent: Tensors) -> bool:
        """Hands `sent` to the neighbour stage if it runs here. Returns whether the neighbour is on another rank."""
        kind, to = ("F", action.stage + 1) if action.kind == "F" else ("B", action.stage - 1)
        if action.kind == "W" or not 0 <= to < len(self.pipeline.parts):
            return False
        if self.keep_mail:
            self.trace.mail[to, kind, action.microbatch] = tuple(
                None if tensor is None else tensor.detach().to("cpu", copy=True) for tensor in sent
            )
        local = self.pipeline.rank_of[to] == self.pipeline.rank_of[action.stage]
        if to in self.runners:
            self.runners[to].receive(kind, action.microbatch, sent, local=local)
        return not local

    def _receive_recorded(self, action: Action) -> None:
        """Delivers recorded mail from a rank that does not run here."""
        kind, source = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
        sent = self.mail.get((action.stage, kind, action.microbatch))
        if sent is not None and action.kind != "W" and source not in self.runners:
            self.runners[action.stage].receive(kind, action.microbatch, sent, local=False)


class SendHandles:
    """Sent tensors kept alive by the handles of one pass: rule 4."""

    def __init__(self, one_f_one_b: bool, n_stages: int, n_microbatches: int) -> None:
        self._one_f_one_b, self._n_stages, self._n_microbatches = one_f_one_b, n_stages, n_microbatches
        self._all: list[object] = []
        self._gradient: dict[int, object] = {}
        self._warm_up: dict[int, object] = {}

    def after(self, action: Action, sent: object) -> None:
        """`action` is done and `sent` has gone to another rank."""
        if not self._one_f_one_b:
            self._all.append(sent)
            return
        n_warm_up = min(self._n_microbatches, self._n_stages - action.stage)
        if action.kind == "F" and action.microbatch == n_warm_up - 2:
            self._warm_up[action.stage] = sent
        elif action.kind == "B":
            self._gradient[action.stage] = sent
            if action.microbatch >= self._n_microbatches - n_warm_up:
                self._warm_up.pop(action.stage, None)


class StageRunner:
    """Runs the actions of one stage and holds its microbatches in flight."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline, self._part, self._module = pipeline, pipeline.parts[stage], pipeline.modules[stage]
        self.losses: dict[int, Tensor] = {}
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor], Tensors]] = {}
        """By microbatch: roots of the backward (outputs, or the loss), leaves, and outputs, which torch keeps too."""
        self._owed: dict[int, Callable[[], None]] = {}
        """By microbatch: what W still has to do."""
        self._buffers: dict[tuple[str, int], Tensors] = {}

    def take_buffers(self) -> None:
        """Receive buffers for every microbatch, both ways: rule 1."""
        part, device = self._part, self._pipeline.trainee.device

        def empty(meta: Meta) -> Tensor:
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)

        for i in range(self._pipeline.n_microbatches):
            if part.stage:
                self._buffers["F", i] = tuple(map(empty, part.metas_in))
            if not part.is_last:
                self._buffers["B", i] = tuple(empty(meta) if meta.requires_grad else None for meta in part.metas_out)

    def receive(self, kind: str, microbatch: int, sent: Tensors, *, local: bool) -> None:
        """Boundary tensors ("F") or their gradients ("B") arrive: from the same rank as they are, else as a copy."""
        if local:
            self._buffers[kind, microbatch] = tuple(None if tensor is None else tensor.detach() for tensor in sent)
            return
        for buffer, tensor in zip(self._buffers[kind, microbatch], sent, strict=True):
            if buffer is not None and tensor is not None:
                buffer.detach().copy_(tensor)
            elif buffer is not None:
                buffer.zero_()

    def do(self, action: Action) -> Tensors:
        """Runs `action` and returns the tensors to send: outputs for F, gradients of received tensors for B and I."""
        i, part = action.microbatch, self._part
        self._module.microbatch = i
        if action.kind == "F":
            return self._forward(i)
        if action.kind == "W":
            self._owed.pop(i)()
            return ()
        outputs, leaves, _ = self._in_flight.pop(i)
        # A frozen stage, or an output that no parameter touched, has no backward; torch would raise.
        useful = [k for k, output in enumerate(outputs) if output.requires_grad]
        roots = [outputs[k] for k in useful]
        gradients = None if part.is_last else [self._buffers["B", i][k] for k in useful]
        if action.kind == "B":
            _backward(roots, gradients)
        elif part.stage:
            # Rule 3: torch walks the graph from outputs to leaves and keeps, group by group, where W has to go on.
            _, groups = backward_input(roots, gradients, leaves, self._module)
            self._owed[i] = partial(backward_weight, self._module, groups)
        else:  # no rank waits for the gradients of a first stage: its I does nothing, its W is the whole backward
            self._owed[i] = partial(_backward, roots, gradients)
            return ()
        if not part.stage:
            return ()
        sent = tuple(leaf.grad for leaf in leaves)
        for leaf in leaves:  # the leaves let go of their gradients: rule 4
            leaf.grad = None
        return sent

    def _forward(self, i: int) -> Tensors:
        pipeline, part = self._pipeline, self._part
        if part.stage:
            # The buffer itself becomes the leaf: a copy would be memory that torch's stage does not take.
            leaves = [
                buffer.requires_grad_(meta.requires_grad)
                for buffer, meta in zip(self._buffers["F", i], part.metas_in, strict=True)
                if buffer is not None
            ]
        else:
            leaves = list(pipeline.batches[i][0])
        with pipeline.forward_of(i):
            sent = self._module(*leaves)
            if part.is_last:
                self.losses[i] = pipeline.loss(sent, pipeline.batches[i][1])
        # Rule 2. The outputs of a last stage stay too, as in torch, although the loss is the root there.
        self._in_flight[i] = ([self.losses[i]] if part.is_last else list(sent), leaves, sent)
        return tuple(tensor.detach() for tensor in sent)


def _backward(roots: list[Tensor], gradients: list[Tensor | None] | None) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)
