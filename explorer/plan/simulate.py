"""A schedule played by a clock before it runs: step time, bubble, critical path, and memory by rank.

Every rank does its row in order; an action starts when the rank is free and what it needs has arrived. Time passes in
actions alone: a transfer takes none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.rank_forecast import RankForecast
from explorer.plan.schedule_check import needs, play
from explorer.plan.schedule_text import Action, Rows, stage_ranks
from explorer.plan.schedules import rows_of
from explorer.record.base import Origin
from explorer.record.pipeline import (
    ActionCost,
    ActionTime,
    Forecast,
    RankUse,
    StageCost,
)
from explorer.record.plan import CheckpointMode, PipelinePlan

Duration = Callable[[Action], float]

UNIT_MS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def unit_cost(action: Action) -> float:
    """Forward, input gradient and weight gradient take one unit each, a full backward two."""
    return UNIT_MS[action.kind]


def simulate(rows: Rows, duration: Duration = unit_cost, *, origin: Origin = "simulated") -> Forecast:
    """Plays `rows`; durations in milliseconds. Raises InvalidPlan on a deadlock."""
    times, blockers = _play_timed(rows, duration)
    makespan = max((time.end_ms for time in times.values()), default=0.0)
    return Forecast(
        origin=origin,
        actions=tuple(sorted(times.values(), key=lambda time: (time.start_ms, time.rank))),
        ranks=tuple(_use(rank, [times[action] for action in row], makespan) for rank, row in enumerate(rows)),
        critical_path=_critical_path(times, blockers),
    )


def forecast(plan: PipelinePlan, costs: tuple[StageCost, ...]) -> Forecast:
    """Plays the plan with these costs, memory by rank included. Raises InvalidPlan."""
    rows = rows_of(plan)
    if len(costs) != len(plan.stages):
        raise InvalidPlan(
            f"{len(costs)} costs are given for {len(plan.stages)} stages.", hint="Profile the model first."
        )

    def cost_of(action: Action) -> ActionCost:
        stage = costs[action.stage]
        chosen = is_checkpointed(plan.checkpoint, action.microbatch, plan.n_microbatches)
        return stage.recomputed if chosen else stage.kept

    def duration(action: Action) -> float:
        cost = cost_of(action)
        if action.kind == "F":
            return cost.forward_ms
        # A split backward runs non-reentrant recompute in both halves (once in W is a floor: torch runs it once a
        # group of parameters).
        plain = cost.backward_ms - cost.recompute_ms
        return cost.backward_ms if action.kind == "B" else plain / 2 + cost.recompute_ms

    played = simulate(rows, duration, origin="predicted")
    return Forecast(
        origin="predicted",
        actions=tuple(_with_recompute(time, cost_of) for time in played.actions),
        ranks=played.ranks,
        memory=tuple(
            RankForecast(plan, costs, stage_ranks(rows), rank).memory(played.actions, cost_of)
            for rank in range(len(rows))
        ),
        critical_path=played.critical_path,
    )


def _with_recompute(time: ActionTime, cost_of: Callable[[Action], ActionCost]) -> ActionTime:
    """Every backward action begins with what runs forward again, both halves of a split one."""
    if time.kind == "F":
        return time
    again = cost_of(Action(time.stage, time.kind, time.microbatch)).recompute_ms
    return msgspec.structs.replace(time, recompute_ms=again)


def is_checkpointed(checkpoint: CheckpointMode, microbatch: int, n_microbatches: int) -> bool:
    """torchgpipe's meaning: except_last keeps the last microbatch, whose backward comes at once in GPipe."""
    return checkpoint == "always" or (checkpoint == "except_last" and microbatch < n_microbatches - 1)


def _play_timed(rows: Rows, duration: Duration) -> tuple[dict[Action, ActionTime], dict[Action, Action | None]]:
    rank_of = stage_ranks(rows)
    n_stages = len(rank_of)
    times: dict[Action, ActionTime] = {}
    blockers: dict[Action, Action | None] = {}
    last: dict[int, Action] = {}
    for action in play(rows):
        rank = rank_of[action.stage]
        before = [last[rank]] if rank in last else []
        for either in needs(action, n_stages):
            before.append(min((other for other in either if other in times), key=lambda other: times[other].end_ms))
        blocker = max(before, key=lambda other: times[other].end_ms, default=None)
        start = times[blocker].end_ms if blocker else 0.0
        times[action] = ActionTime(
            rank=rank,
            stage=action.stage,
            kind=action.kind,  # type: ignore[arg-type]
            microbatch=action.microbatch,
            start_ms=start,
            end_ms=start + duration(action),
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


def _critical_path(times: dict[Action, ActionTime], blockers: dict[Action, Action | None]) -> tuple[str, ...]:
    at = max(times, key=lambda action: times[action].end_ms, default=None)
    path = []
    while at is not None:
        path.append(str(at))
        at = blockers[at]
    return tuple(reversed(path))
