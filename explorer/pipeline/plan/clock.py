"""A schedule on a clock. Before it runs: step time, bubble, critical path, and memory by rank. After: waits and notes.

Every rank does its row in order; an action starts when the rank is free and what it needs has arrived. In a simulation
time passes in actions alone: a transfer takes none. On the ranks' own clocks, a free rank whose neighbour is done waits
only for the transfer.

Memory of a rank:

    held between actions    parameters + receive buffers + saved activations in flight + gradients + sends in flight
    held while one runs     that sum, and the action's highest point above it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.actions import Action, Rows, Triple, execution_order, needs, parse_rows, stage_ranks
from explorer.pipeline.plan.cuts import left_out
from explorer.pipeline.plan.schedules import rows_of, runs_1f1b, splits_backward
from explorer.pipeline.record.step import (
    ActionCost,
    ActionTime,
    PipelineRun,
    PlayedSchedule,
    RankMemory,
    RankUse,
    StageCost,
)
from explorer.plan.names import some
from explorer.record.base import Origin
from explorer.record.run import CheckpointMode, PipelineEngine, PipelinePlan

Duration = Callable[[Action], float]

UNIT_MS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Forward, input gradient and weight gradient take one unit each, a full backward two."""
BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
WHERE: dict[PipelineEngine, str] = {
    "inproc": "All ranks ran in one process, in turns: times are composed from each action's own.",
    "replay": "Each rank ran alone, fed with recorded boundary tensors: no other rank contended for the machine.",
    "procs": "Ranks ran at once on this machine: with more ranks than cores, their times measure contention.",
    "torchrun": "Ranks ran at once where torchrun started them: step and gaps are wall time, links included.",
}


def simulate(
    rows: Rows,
    duration: Duration = lambda action: UNIT_MS[action.kind],
    *,
    recompute: Duration = lambda action: 0.0,
    origin: Origin = "simulated",
) -> PlayedSchedule:
    """The times of `rows` from durations, and the part of each that is recompute, in milliseconds. Raises InvalidPlan
    on a deadlock."""
    rank_of = stage_ranks(rows)
    times: dict[Triple, ActionTime] = {}
    ends: dict[Triple, float] = {}
    blockers: dict[Triple, Triple | None] = {}
    last: dict[int, Triple] = {}
    for action in execution_order(rows):
        stage, kind, microbatch = action
        rank = rank_of[stage]
        blocker: Triple | None = last.get(rank)
        start = ends[blocker] if blocker else 0.0
        for either in needs(action, len(rank_of)):
            other = either[0] if either[0] in ends else either[-1]
            if ends[other] > start:
                blocker, start = other, ends[other]
        ends[action] = end = start + duration(action)
        times[action] = ActionTime(
            rank=rank,
            stage=stage,
            kind=kind,  # type: ignore[arg-type]
            microbatch=microbatch,
            start_ms=start,
            end_ms=end,
            recompute_ms=recompute(action),
        )
        blockers[action], last[rank] = blocker, action
    return played_schedule(rows, times, blockers, origin)


def played_schedule(
    rows: Rows, times: dict[Triple, ActionTime], blockers: dict[Triple, Triple | None], origin: Origin
) -> PlayedSchedule:
    """The record of actions with known times; `blockers`: the action that each action waited for last."""
    makespan = max((time.end_ms for time in times.values()), default=0.0)
    return PlayedSchedule(
        origin=origin,
        actions=tuple(sorted(times.values(), key=lambda time: (time.start_ms, time.rank))),
        ranks=tuple(_use(rank, [*map(times.__getitem__, row)], makespan) for rank, row in enumerate(rows)),
        critical_path=_critical_path(times, blockers),
    )


def forecast(plan: PipelinePlan, costs: tuple[StageCost, ...]) -> PlayedSchedule:
    """Plays the plan with these costs, memory by rank included. Raises InvalidPlan, also if a backward is split."""
    rows = rows_of(plan)
    if splits_backward(plan):
        raise InvalidPlan(
            f"{plan.schedule_name} splits the backward (I, W): its time and memory are not predicted.",
            hint="Press Run: the schedule is drawn as measured. 1F1B and Interleaved1F1B are predicted.",
        )
    n = plan.n_microbatches
    chosen = [is_checkpointed(plan.checkpoint, i, n) for i in range(n)]

    def cost_of(stage: int, microbatch: int) -> ActionCost:
        return costs[stage].recomputed if chosen[microbatch] else costs[stage].kept

    def duration_ms(action: Action) -> float:
        cost = cost_of(action[0], action[2])
        return cost.forward_ms if action[1] == "F" else cost.backward_ms

    def recompute_ms(action: Action) -> float:
        return 0.0 if action[1] == "F" else cost_of(action[0], action[2]).recompute_ms

    played = simulate(rows, duration_ms, recompute=recompute_ms, origin="predicted")
    memory = RankForecast(plan, costs, stage_ranks(rows), cost_of)
    return replace(played, memory=memory.ranks(len(rows), played.actions))


def is_checkpointed(checkpoint: CheckpointMode, microbatch: int, n_microbatches: int) -> bool:
    """torchgpipe's meaning: except_last keeps the last microbatch, whose backward comes at once in GPipe."""
    return checkpoint == "always" or (checkpoint == "except_last" and microbatch < n_microbatches - 1)


def _use(rank: int, times: list[ActionTime], makespan: float) -> RankUse:
    busy = sum(time.duration_ms for time in times)
    splits = {(time.stage, time.microbatch) for time in times if time.kind == "W"}
    flying = most = 0
    for time in times:
        if time.kind == "F":
            flying += 1
        elif time.kind == "W" or (time.kind == "B" and (time.stage, time.microbatch) not in splits):
            flying -= 1
        most = max(most, flying)
    idle = 1.0 - busy / makespan if makespan else 0.0
    return RankUse(rank=rank, busy_ms=busy, bubble_fraction=idle, n_in_flight=most)


def _critical_path(times: dict[Triple, ActionTime], blockers: dict[Triple, Triple | None]) -> tuple[str, ...]:
    at = max(times, key=lambda action: times[action].end_ms, default=None)
    path = []
    while at is not None:
        path.append(times[at].name)
        at = blockers[at]
    return tuple(reversed(path))


@dataclass
class RankForecast:
    """Memory of ranks, action by action. `home`: the rank of each stage; `cost_of(stage, microbatch)`: the cost of a
    stage's actions."""

    plan: PipelinePlan
    costs: tuple[StageCost, ...]
    home: dict[int, int]
    cost_of: Callable[[int, int], ActionCost]
    _with_gradient: set[int] = field(default_factory=set)

    def ranks(self, n_ranks: int, times: Sequence[ActionTime]) -> tuple[RankMemory, ...]:
        """Held bytes at the highest point and at the end of every action; `times` in order of their start."""
        of_rank: defaultdict[int, list[ActionTime]] = defaultdict(list)
        for time in times:
            of_rank[time.rank].append(time)
        return tuple(self._memory(rank, of_rank[rank]) for rank in range(n_ranks))

    def _memory(self, rank: int, times: list[ActionTime]) -> RankMemory:
        parameters, buffers = self._fixed(rank)
        now_bytes = parameters + buffers
        samples = [(0, now_bytes, "")]
        for time in times:
            high, now_bytes = self._through((time.stage, time.kind, time.microbatch), now_bytes)
            samples += [(round(time.start_ms * 1e6), high, time.name), (round(time.end_ms * 1e6), now_bytes, "")]
        return RankMemory.of(rank, "predicted", samples, parameter_bytes=parameters, receive_bytes=buffers)

    def _fixed(self, rank: int) -> tuple[int, int]:
        """Parameters and receive buffers, held all the time."""
        stages = [self.costs[stage] for stage, home in self.home.items() if home == rank]
        buffers = sum(stage.receive_bytes + stage.gradient_receive_bytes for stage in stages) * self.plan.n_microbatches
        return sum(stage.parameter_bytes for stage in stages), buffers

    def _through(self, action: Triple, now_bytes: int) -> tuple[int, int]:
        """Highest point of an action that begins with `held`, and what is held after it."""
        stage, kind, i = action
        cost = self.cost_of(stage, i)
        if kind == "F":
            # An output for a stage of the same rank takes the place of that stage's buffer.
            replaced = self.costs[stage].gradient_receive_bytes if self._same_rank(stage, stage + 1) else 0
            return now_bytes + cost.forward_extra_bytes, now_bytes + cost.saved_bytes - replaced
        after = now_bytes - cost.saved_bytes + self._sent_output(stage, i) + self.costs[stage].loss_bytes
        after += self._sent_gradient(stage, i, cost)
        extra = cost.backward_extra_bytes
        if stage not in self._with_gradient:
            self._with_gradient.add(stage)
            after += self.costs[stage].gradient_bytes
            extra = cost.first_backward_extra_bytes
        return now_bytes + extra, after

    def _sent_output(self, stage: int, i: int) -> int:
        """Bytes of an output that torch still holds when its microbatch is through; in_process.py has the rules."""
        if stage + 1 not in self.home:
            return 0
        size, m = self.costs[stage].gradient_receive_bytes - self.costs[stage].passed_bytes, self.plan.n_microbatches
        if not runs_1f1b(self.plan) or self._same_rank(stage, stage + 1):
            return size
        n_warm_up = min(m, len(self.costs) - stage)
        taken_bytes = size if i == n_warm_up - 2 and i < m - n_warm_up else 0
        released_bytes = size if 0 <= n_warm_up - 2 < m - n_warm_up == i else 0
        return taken_bytes - released_bytes

    def _sent_gradient(self, stage: int, i: int, cost: ActionCost) -> int:
        """Bytes of a gradient that torch holds after sending it; within the rank it takes the place of a buffer."""
        if stage == 0 or (runs_1f1b(self.plan) and i > 0):
            return 0
        received = self.costs[stage].receive_bytes
        sent = received if cost.sent_gradient_bytes is None else cost.sent_gradient_bytes
        return sent - (received if self._same_rank(stage, stage - 1) else 0)

    def _same_rank(self, stage: int, to: int) -> bool:
        return self.home.get(to) == self.home[stage]


def schedule_of(rows: Rows, actions: Sequence[ActionTime]) -> PlayedSchedule:
    """The schedule at the times of the ranks' own clocks: gaps contain links, contention and all other waits."""
    times = {_triple(time): time for time in actions}
    blockers: dict[Triple, Triple | None] = {}
    for row in rows:
        for before, action in zip((None, *row), row):
            waited = _needed(action, times) if before is None else [*_needed(action, times), times[before]]
            last = max(waited, key=lambda time: time.end_ms, default=None)
            blockers[action] = None if last is None else _triple(last)
    return played_schedule(rows, times, blockers, "measured")


def _triple(time: ActionTime) -> Triple:
    return time.stage, time.kind, time.microbatch


def _needed(action: Triple, times: dict[Triple, ActionTime]) -> list[ActionTime]:
    """The timed actions that `action` needs."""
    n_stages = 1 + max(stage for stage, _, _ in times)
    return [times[other] for either in needs(action, n_stages) for other in either if other in times]


class Transfer(NamedTuple):
    """The wait of `rank` before one action, for what `source` sent."""

    source: int
    """Stage."""
    target: int
    rank: int
    start_ms: float
    end_ms: float

    @property
    def wait_ms(self) -> float:
        return self.end_ms - self.start_ms


def transfers(schedule: PlayedSchedule) -> tuple[Transfer, ...]:
    """Every wait for a transfer between ranks, in order of its end."""
    times = {_triple(time): time for time in schedule.actions}
    free: defaultdict[int, float] = defaultdict(float)
    waits = []
    for time in sorted(schedule.actions, key=lambda time: time.start_ms):
        others = (other for other in _needed(_triple(time), times) if other.rank != time.rank)
        sent = max(others, key=lambda other: other.end_ms, default=None)
        if sent is not None and (start := max(sent.end_ms, free[time.rank])) < time.start_ms:
            waits.append(Transfer(sent.stage, time.stage, time.rank, start, time.start_ms))
        free[time.rank] = time.end_ms
    return tuple(waits)


def notes(run: PipelineRun) -> tuple[str, ...]:
    """Notes that a reader needs to read the figures correctly."""
    sentences = [WHERE[run.engine]]
    if run.wall is not None and run.composed is not None:
        sentences.append(_links_in_words(run.wall, run.composed))
    tied = [shares.name for shares in run.gradients if len(shares.stages) > 1]
    if tied:
        sentences.append(
            f"{', '.join(tied)} is used by several stages: their gradients are summed, in another order than unsplit, "
            "so the last bits may differ."
        )
    worst = max(run.blocks, key=lambda block: block.multiplier, default=None)
    if worst is not None and worst.multiplier > 2:
        sentences.append(
            f"{worst.fqn} ran {worst.multiplier:g} times for each forward call: a schedule that splits the backward "
            "runs a non-reentrant checkpoint again for every group of parameters."
        )
    plan = run.spec.plan
    if plan is not None and run.predicted is not None and (missing := left_out(plan, run.spec.policy)):
        sentences.append(missing)
    if plan is not None and (stages := out_of_order(run.rows)):
        sentences.append(
            f"{plan.schedule_name} runs the backwards of stage {', '.join(map(str, stages))} in another order of "
            "microbatches than the unsplit model: sums differ in their last bits, which float64 judges as rounding."
        )
    if far := sum(shares.microbatching.verdict == "different" for shares in run.gradients):
        sentences.append(
            f"Microbatching alone moved {far} gradients by more than rounding. Usual causes: each microbatch has a "
            "dropout mask, a BatchNorm mean, and its own divisor in a loss with class weights or ignored targets"
            f"{_moved_buffers(run)}. That is not the split's doing: the split is "
            "compared with the whole model on the same microbatches."
        )
    if run.spec.n_accumulation > 1:
        sentences.append(
            f"Accumulation over {run.spec.n_accumulation} batches was left out: a pipelined step accumulates over its "
            "microbatches."
        )
    if plan is not None and not plan.keyed_rng:
        sentences.append("Random numbers were not keyed by block and microbatch: dropout depends on the split.")
    return tuple(sentences)


def _moved_buffers(run: PipelineRun) -> str:
    """Part of a sentence on the buffers that each forward changes, such as the vectors of a spectral norm."""
    names = (shares.name for shares in run.buffers if not shares.microbatching.bitwise)
    changed = [name for name in names if name.rpartition(".")[2] not in BATCH_STATISTICS]
    return f", and changes {some(changed)}" if changed else ""


def _links_in_words(wall: PlayedSchedule, composed: PlayedSchedule) -> str:
    waits: defaultdict[tuple[int, int], float] = defaultdict(float)
    for wait in transfers(wall):
        waits[wait.source, wait.target] += wait.wait_ms
    source, target = max(waits, key=lambda pair: waits[pair], default=(0, 0))
    worst = f", most of them from stage {source} to {target}" if waits else ""
    return (
        f"The step took {wall.makespan_ms:.1f} ms by the ranks' own clocks; with links that cost nothing its actions "
        f"would take {composed.makespan_ms:.1f} ms. Ranks waited {sum(waits.values()):.1f} ms in all for transfers"
        f"{worst}."
    )


def out_of_order(rows: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """Stages that add up their microbatches' gradients in another order than first to last."""
    orders: dict[int, list[int]] = {}
    for row in parse_rows(rows):
        for action in row:
            if action.kind in "BW":
                orders.setdefault(action.stage, []).append(action.microbatch)
    return tuple(stage for stage, order in sorted(orders.items()) if order != sorted(order))
