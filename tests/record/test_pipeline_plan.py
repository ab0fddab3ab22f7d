"""A reader is told the schedule's name, or that it is the person's own."""

from __future__ import annotations

from explorer.record.run import OWN_SCHEDULE, PipelinePlan


def test_rows_of_ones_own_have_a_name_of_their_own() -> None:
    plan = PipelinePlan(stages=(("a",),), n_microbatches=1, schedule="1F1B")
    assert plan.schedule_name == "1F1B"
    assert PipelinePlan(stages=(("a",),), n_microbatches=1, actions=(("0F0",),)).schedule_name == OWN_SCHEDULE
