"""Consistency checks of a pipeline's run, as record/sound.py of the core has them for other runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from explorer.pipeline.record.step import PipelineRun, PlayedSchedule, RankMemory
from explorer.record.base import Record
from explorer.record.sound import MOST_BYTES, misfit


def faults(record: Record) -> Iterator[str]:
    """Every fault of a pipeline's run; none for other records."""
    if not isinstance(record, PipelineRun):
        return
    played = {"as if alone": record.composed, "as read": record.wall, "as predicted": record.predicted}
    for name, schedule in played.items():
        if schedule is not None:
            yield from (f"{name}: {fault}" for fault in _played(schedule))
    yield from _memory(record.memory, len(record.rows))


def _played(schedule: PlayedSchedule) -> Iterator[str]:
    n_ranks = len(schedule.ranks)
    if not n_ranks or [use.rank for use in schedule.ranks] != list(range(n_ranks)):
        yield f"ranks {[use.rank for use in schedule.ranks][:9]}"
    if any(action.rank >= n_ranks or action.end_ms < action.start_ms for action in schedule.actions):
        yield f"an action beyond {n_ranks} ranks, or that ends before it starts"
    yield from _memory(schedule.memory, n_ranks)


def _memory(memory: Sequence[RankMemory], n_ranks: int) -> Iterator[str]:
    if len({rank.rank for rank in memory}) < len(memory) or any(rank.rank >= n_ranks for rank in memory):
        yield f"memory of ranks {[rank.rank for rank in memory][:9]} of {n_ranks}"
    for rank in memory:
        columns = {
            "time_ns": (rank.time_ns, 0, MOST_BYTES),
            "held_bytes": (rank.held_bytes, 0, MOST_BYTES),
            "action": (rank.action, -1, len(rank.actions) - 1),
        }
        for name, (column, least, most) in columns.items():
            if fault := misfit(column, len(rank.time_ns), most, least):
                yield f"rank {rank.rank}: {name} {fault}"
        if any(later < time for time, later in zip(rank.time_ns, rank.time_ns[1:])):
            yield f"rank {rank.rank}: time_ns does not ascend"
