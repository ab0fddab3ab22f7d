"""The action list in one process: ranks take turns, and every action is real forward or backward work.

Also some ranks alone, for the prices of single stages: with the boundary tensors of an earlier run played back, rank r
of R runs as if the others were there. Time is read without the allocator's recording, memory with it: two passes over
the same actions.

Sent tensors that torch's schedules still hold stay alive here too, else memory by rank would be too low. Read in torch
2.13 (schedules.py) and confirmed against real ranks over gloo, to the byte (tests/engine/pipeline): GPipe and the
runtime keep the handles of all sends to the end of the step. 1F1B keeps its last sent gradient until the next send, and
the output of its last warm-up send but one until the drain begins.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

from explorer.engine.device.device import WallClock, device_of
from explorer.engine.pipeline.build import Pipeline
from explorer.engine.pipeline.microbatches import deferred_batch_norm
from explorer.engine.pipeline.pass_readings import MemoryWatch, PassReadings
from explorer.engine.pipeline.stage_runner import StageRunner, Tensors
from explorer.engine.state.rng import seed_everything
from explorer.plan.pipeline.actions import Action, execution_order
from explorer.plan.pipeline.schedules import runs_1f1b
from explorer.record.pipeline import ActionTime, RankMemory
from explorer.record.plan import Progress, Report, silent

RECEIVE_BUFFERS = "receive buffers"

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
    with ExitStack() as stack:
        stack.enter_context(trace.readings.recording())
        stack.enter_context(deferred_batch_norm(pipeline.trainee.model, enabled=pipeline.plan.deferred_batch_norm))
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
            with readings.outside(pipeline.rank_of[stage], RECEIVE_BUFFERS):
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
        kind = "F" if action.kind == "F" else "B"
        to = action.stage + (1 if kind == "F" else -1)
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
        kind = "F" if action.kind == "F" else "B"
        source = action.stage - (1 if kind == "F" else -1)
        sent = self.mail.get((action.stage, kind, action.microbatch))
        if sent is not None and action.kind != "W" and source not in self.runners:
            self.runners[action.stage].receive(kind, action.microbatch, sent, local=False)


class SendHandles:
    """Sent tensors kept alive by the handles of one pass."""

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
