"""The action list in one process: ranks take turns, and every action is real forward or backward work.

Also some ranks alone: with the boundary tensors of an earlier run played back, rank r of R runs on one device as if the
others were there. Time is read without the allocator's recording, memory with it: two passes over the same actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from explorer.engine.device.device import Device, device_of
from explorer.engine.pipeline.cut.build import Pipeline, static_bytes
from explorer.engine.pipeline.play.batch_norm import deferred_batch_norm
from explorer.engine.pipeline.play.block_calls import CallCount, counting_calls
from explorer.engine.pipeline.play.held_sends import HeldSends
from explorer.engine.pipeline.play.rank_memory import BUFFERS, MemoryWatch
from explorer.engine.pipeline.play.stage_runner import StageRunner, Tensors
from explorer.engine.state.rng import seed_everything
from explorer.plan.pipeline.actions import Action
from explorer.plan.pipeline.rules import play
from explorer.record.pipeline_run import ActionTime, RankMemory
from explorer.record.plan import Progress, Report, silent

Mail = dict[tuple[int, str, int], Tensors]
"""By receiving stage, kind ("F" or "B") and microbatch: boundary tensors, or their gradients."""


@dataclass
class Trace:
    """Results of one pass over an action list."""

    actions: list[ActionTime] = field(default_factory=list)
    """On the clock of this process: one after another."""
    losses: dict[int, float] = field(default_factory=dict)
    loss_bytes: int = 0
    """Bytes kept by the loss of one microbatch until the step ends: torch's mean may hold its input's storage."""
    calls: CallCount = field(default_factory=CallCount)
    mail: Mail = field(default_factory=dict)
    """All tensors that crossed a boundary, on the CPU; empty without `keep_mail`."""
    watch: MemoryWatch | None = None

    def memory(
        self, pipeline: Pipeline, clock: tuple[ActionTime, ...], ranks: Collection[int]
    ) -> tuple[RankMemory, ...]:
        """Bytes by rank, with `clock` as the axis. Empty where this pass recorded none."""
        if self.watch is None:
            return ()
        static = {
            r: sum(static_bytes(pipeline.modules[j]) for j, home in pipeline.rank_of.items() if home == r)
            for r in ranks
        }
        return self.watch.ranks(static, {rank: receive_bytes(pipeline, rank) for rank in ranks}, clock)


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
    ranks, mail = alone or (range(len(pipeline.rows)), None)
    device, rank_of = device_of(pipeline.trainee.device), pipeline.rank_of
    order = [action for action in play(pipeline.rows) if rank_of[action.stage] in ranks]
    runners = {action.stage: StageRunner(pipeline, action.stage) for action in order}
    pipeline.reset(set(runners))
    if not pipeline.plan.keyed_rng:
        seed_everything(pipeline.spec.seed)
    trace = Trace(watch=MemoryWatch(device) if memory else None)
    with ExitStack() as stack:
        stack.enter_context(trace.watch or nullcontext())
        stack.enter_context(deferred_batch_norm(pipeline.trainee.model, enabled=pipeline.plan.deferred_batch_norm))
        stack.enter_context(counting_calls(pipeline, trace.calls))
        _Pass(pipeline, runners, trace, device, mail, keep_mail).run(order, report)
    losses = {i: loss.detach() for runner in runners.values() for i, loss in sorted(runner.losses.items())}
    trace.losses = {i: float(loss) for i, loss in losses.items()}
    trace.loss_bytes = max((loss.untyped_storage().nbytes() for loss in losses.values()), default=0)
    return trace


def receive_bytes(pipeline: Pipeline, rank: int) -> int:
    """Receive buffers of all microbatches, both ways, for the stages of `rank`."""
    last = len(pipeline.parts) - 1
    total = 0
    for part in pipeline.parts:
        if pipeline.rank_of[part.stage] == rank:
            total += sum(meta.n_bytes for meta in part.metas_in) if part.stage else 0
            total += sum(meta.n_bytes for meta in part.metas_out if meta.requires_grad) if part.stage < last else 0
    return total * pipeline.n_microbatches


@dataclass
class _Pass:
    pipeline: Pipeline
    runners: dict[int, StageRunner]
    trace: Trace
    device: Device
    mail: Mail | None
    keep_mail: bool
    marks: list[tuple[Action, object, object, tuple[int, int]]] = field(default_factory=list)
    """Actions with begin, end, and the numbers of the runs for backward inside."""

    def run(self, order: list[Action], report: Report) -> None:
        plan = self.pipeline.plan
        held = HeldSends(plan.schedule == "1F1B" and not plan.actions, len(plan.stages), plan.n_microbatches)
        for stage, runner in self.runners.items():
            with self._doing(self.pipeline.rank_of[stage], BUFFERS):
                runner.take_buffers()
        clock = self.device.clock()
        start = clock.mark()
        for n_done, action in enumerate(order):
            report(Progress(what=f"action {action}", done=n_done, total=len(order)))
            self.pipeline.under_way = action
            runner = self.runners[action.stage]
            self._play_back(action, runner)
            with self._doing(self.pipeline.rank_of[action.stage], str(action)):
                before, first = len(self.trace.calls.reruns), clock.mark()
                sent = runner.do(action)
                self.marks.append((action, first, clock.mark(), (before, len(self.trace.calls.reruns))))
            if self._deliver(action, sent):
                held.after(action, sent)
            del sent
        clock.settle()
        self.pipeline.under_way = None
        self.trace.actions = [
            ActionTime(
                rank=self.pipeline.rank_of[action.stage],
                stage=action.stage,
                kind=action.kind,  # type: ignore[arg-type]
                microbatch=action.microbatch,
                start_ms=clock.between_ms(start, first),
                end_ms=clock.between_ms(start, last),
                recompute_ms=self.trace.calls.recompute_ms(clock, *again),
            )
            for action, first, last, again in self.marks
        ]

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

    def _play_back(self, action: Action, runner: StageRunner) -> None:
        """Delivers recorded mail from a rank that does not run here."""
        kind = "F" if action.kind == "F" else "B"
        source = action.stage - (1 if kind == "F" else -1)
        if self.mail is None or action.kind == "W" or source in self.runners:
            return
        if (key := (action.stage, kind, action.microbatch)) in self.mail:
            runner.receive(kind, action.microbatch, self.mail[key], local=False)

    @contextmanager
    def _doing(self, rank: int, name: str) -> Iterator[None]:
        with self.trace.watch.doing(rank, name) if self.trace.watch else nullcontext():
            yield
