"""What a link costs is found in the gaps that the ranks' own clocks leave."""

from __future__ import annotations

from explorer.plan.pipeline.clock import as_read, simulate
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.plan.pipeline.transfers import links, transfers
from explorer.record.pipeline_run import ActionTime

ROWS = one_f_one_b(2, 1)


def at(rank: int, kind: str, start: float, end: float) -> ActionTime:
    return ActionTime(rank=rank, stage=rank, kind=kind, microbatch=0, start_ms=start, end_ms=end)  # type: ignore[arg-type]


READ = (at(0, "F", 0, 10), at(1, "F", 40, 50), at(1, "B", 50, 70), at(0, "B", 100, 120))


def test_the_step_is_as_long_as_the_ranks_were_at_it() -> None:
    wall = as_read(ROWS, READ)
    assert wall.makespan_ms == 120
    assert [use.busy_ms for use in wall.ranks] == [30, 30]
    assert wall.bubble_fraction == 0.75
    assert wall.critical_path == ("0F0", "1F0", "1B0", "0B0")


def test_a_link_costs_what_a_free_rank_waited_for_a_neighbour_that_was_done() -> None:
    sent = transfers(as_read(ROWS, READ))
    assert [(one.source, one.target, one.start_ms, one.end_ms) for one in sent] == [(0, 1, 10, 40), (1, 0, 70, 100)]
    assert sum(link.wait_ms for link in links(as_read(ROWS, READ))) == 60


def test_a_played_schedule_has_free_links() -> None:
    assert transfers(simulate(one_f_one_b(3, 5))) == ()
