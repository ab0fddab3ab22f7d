"""Sums in another order are said, whatever schedule brings them."""

from __future__ import annotations

import pytest

from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.notes import out_of_order
from explorer.plan.pipeline.schedules import SCHEDULES, rows_of
from explorer.record.run import PipelinePlan


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_looped_bfs_adds_up_in_another_order(schedule: str) -> None:
    rows = rows_of(PipelinePlan(stages=(("a",), ("b",), ("c",), ("d",)), n_microbatches=4, schedule=schedule))
    assert bool(out_of_order(format_rows(rows))) == (schedule == "LoopedBFS")
