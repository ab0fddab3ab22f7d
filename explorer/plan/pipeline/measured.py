"""A schedule after its run: actions at the ranks' own clocks, waits for transfers, and notes for the reader.

A free rank whose neighbour is done waits only for the transfer. In a composed picture transfers take no time, and no
waits are found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from explorer.plan.names import some
from explorer.plan.pipeline.actions import Rows, Triple, needs, parse_rows, stage_ranks
from explorer.plan.pipeline.clock import played_schedule
from explorer.plan.pipeline.stage_costs import left_out
from explorer.record.pipeline import ActionTime, PipelineRun, PlayedSchedule
from explorer.record.run import PipelineEngine

BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
WHERE: dict[PipelineEngine, str] = {
    "inproc": "All ranks ran in one process, in turns: times are composed from each action's own.",
    "replay": "Each rank ran alone, fed with recorded boundary tensors: no other rank contended for the machine.",
    "procs": "Ranks ran at once on this machine: with more ranks than cores, their times measure contention.",
    "torchrun": "Ranks ran at once where torchrun started them: step and gaps are wall time, links included.",
}


def schedule_of(rows: Rows, actions: Sequence[ActionTime]) -> PlayedSchedule:
    """The schedule at the times of the ranks' own clocks: gaps contain links, contention and all other waits."""
    times: dict[Triple, ActionTime] = {(time.stage, time.kind, time.microbatch): time for time in actions}
    n_stages = len(stage_ranks(rows))
    blockers: dict[Triple, Triple | None] = {}
    for row in rows:
        for before, action in zip((None, *row), row):
            waited = [other for either in needs(action, n_stages) for other in either if other in times]
            candidates: list[Triple] = waited if before is None else [*waited, before]
            blockers[action] = max(candidates, key=lambda other: times[other].end_ms, default=None)
    return played_schedule(rows, times, blockers, "measured")


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
    times: dict[Triple, ActionTime] = {(time.stage, time.kind, time.microbatch): time for time in schedule.actions}
    n_stages = 1 + max((time.stage for time in schedule.actions), default=-1)
    free: defaultdict[int, float] = defaultdict(float)
    waits = []
    for time in sorted(schedule.actions, key=lambda time: time.start_ms):
        action: Triple = (time.stage, time.kind, time.microbatch)
        waited = [times[other] for either in needs(action, n_stages) for other in either if other in times]
        sent = max((other for other in waited if other.rank != time.rank), key=lambda other: other.end_ms, default=None)
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
            f"dropout mask and a BatchNorm mean{_moved_buffers(run)}. That is not the split's doing: the split is "
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
    changed = [shares.name for shares in run.buffers if not shares.microbatching.bitwise]
    changed = [name for name in changed if name.rpartition(".")[2] not in BATCH_STATISTICS]
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
