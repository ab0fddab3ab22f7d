"""A schedule played by a clock before it runs: step time, bubble, critical path, and memory by rank.

Every rank does its row in order; an action starts when the rank is free and what it needs has arrived. Time passes in
actions alone: a transfer takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import Action, Rows, stage_ranks
from explorer.plan.pipeline.rank_memory import RankForecast
from explorer.plan.pipeline.rules import Triple, needs, play
from explorer.plan.pipeline.schedules import rows_of
from explorer.plan.pipeline.split_backward import Priced, priced_backward
from explorer.record.base import Origin
from explorer.record.pipeline_cost import StageCost
from explorer.record.pipeline_run import ActionTime, PlayedSchedule, RankUse
from explorer.record.run import CheckpointMode, PipelinePlan

Duration = Callable[[Action], float]

UNIT_MS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def unit_cost(action: Action) -> float:
    """Forward, input gradient and weight gradient take one unit each, a full backward two."""
    return UNIT_MS[action.kind]


def nothing(action: Action) -> float:
    """No action recomputes."""
    return 0.0


def simulate(
    rows: Rows, duration: Duration = unit_cost, *, recompute: Duration = nothing, origin: Origin = "simulated"
) -> PlayedSchedule:
    """Plays `rows`; durations, and the part of each that is recompute, in milliseconds. Raises InvalidPlan on a
    deadlock."""
    times, blockers = _play_timed(rows, duration, recompute)
    makespan = max((time.end_ms for time in times.values()), default=0.0)
    return PlayedSchedule(
        origin=origin,
        actions=tuple(sorted(times.values(), key=lambda time: (time.start_ms, time.rank))),
        ranks=tuple(_use(rank, [times[action] for action in row], makespan) for rank, row in enumerate(rows)),
        critical_path=_critical_path(times, blockers),
    )


def as_read(rows: Rows, actions: Sequence[ActionTime]) -> PlayedSchedule:
    """Actions where the ranks' own clocks put them: links, contention and everything else they wait for is in the
    gaps."""
    times: dict[Triple, ActionTime] = {(time.stage, time.kind, time.microbatch): time for time in actions}
    n_stages = len(stage_ranks(rows))
    blockers: dict[Triple, Triple | None] = {}
    for row in rows:
        for before, action in zip((None, *row), row):
            waited = [other for either in needs(action, n_stages) for other in either if other in times]
            known: list[Triple] = waited if before is None else [*waited, before]
            blockers[action] = max(known, key=lambda other: times[other].end_ms, default=None)
    makespan = max((time.end_ms for time in actions), default=0.0)
    return PlayedSchedule(
        origin="measured",
        actions=tuple(sorted(actions, key=lambda time: (time.start_ms, time.rank))),
        ranks=tuple(_use(rank, [times[action] for action in row], makespan) for rank, row in enumerate(rows)),
        critical_path=_critical_path(times, blockers),
    )


def forecast(plan: PipelinePlan, costs: tuple[StageCost, ...]) -> PlayedSchedule:
    """Plays the plan with these costs, memory by rank included. Raises InvalidPlan."""
    rows = rows_of(plan)
    if len(costs) != len(plan.stages):
        raise InvalidPlan(
            f"{len(costs)} costs are given for {len(plan.stages)} stages.", hint="Profile the model first."
        )
    n = plan.n_microbatches
    chosen = [is_checkpointed(plan.checkpoint, i, n) for i in range(n)]
    priced = [{False: priced_backward(stage.kept), True: priced_backward(stage.recomputed)} for stage in costs]
    prices = [{on: _by_kind(cost) for on, cost in stage.items()} for stage in priced]
    played = simulate(
        rows,
        lambda action: prices[action[0]][chosen[action[2]]][action[1]][0],
        recompute=lambda action: prices[action[0]][chosen[action[2]]][action[1]][1],
        origin="predicted",
    )
    memory = RankForecast(plan, costs, stage_ranks(rows), lambda stage, i: priced[stage][chosen[i]])
    return msgspec.structs.replace(played, memory=memory.ranks(len(rows), played.actions))


def _by_kind(cost: Priced) -> dict[str, tuple[float, float]]:
    """Milliseconds of each kind of action, and how many of them are recompute."""
    whole, split = cost
    return {
        "F": (whole.forward_ms, 0.0),
        "B": (whole.backward_ms, whole.recompute_ms),
        "I": (split.input_ms, split.input_recompute_ms),
        "W": (split.weight_ms, split.weight_recompute_ms),
    }


def is_checkpointed(checkpoint: CheckpointMode, microbatch: int, n_microbatches: int) -> bool:
    """torchgpipe's meaning: except_last keeps the last microbatch, whose backward comes at once in GPipe."""
    return checkpoint == "always" or (checkpoint == "except_last" and microbatch < n_microbatches - 1)


def _play_timed(
    rows: Rows, duration: Duration, recompute: Duration
) -> tuple[dict[Triple, ActionTime], dict[Triple, Triple | None]]:
    rank_of = stage_ranks(rows)
    n_stages = len(rank_of)
    times: dict[Triple, ActionTime] = {}
    ends: dict[Triple, float] = {}
    blockers: dict[Triple, Triple | None] = {}
    last: dict[int, Triple] = {}
    for action in play(rows):
        stage, kind, microbatch = action
        rank = rank_of[stage]
        blocker: Triple | None = last.get(rank)
        start = ends[blocker] if blocker else 0.0
        for either in needs(action, n_stages):
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
    return times, blockers


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
