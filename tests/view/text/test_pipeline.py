"""What was planned below a cap, what is proven of it, and what a run says."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.record import Policy, RunSpec
from explorer.record.pipeline_run import fullest_bytes, rank_memory
from explorer.record.plan import JointPlan
from explorer.view.drawing.units import MIB
from explorer.view.text import pipeline as words
from explorer.view.text.pipeline import cap_kept, cap_outcome, planned
from tests import graphs, pipelines

GRAPH = graphs.gpt(4)
PLAN = pipelines.planned(GRAPH)
JOINT = JointPlan(
    plan=PLAN, policy=Policy.recompute(["blocks.0"]), cap_bytes=80 * MIB, makespan_ms=20.0,
    rank_bytes=(70 * MIB, 60 * MIB), cuts_first_ms=25.0, n_judged=9, bound_ms=16.0,
)  # fmt: skip


def test_a_plan_says_what_it_chose_and_what_an_even_cut_would_have_cost() -> None:
    text = planned(JOINT)
    assert text.startswith("Planned below 80.0 MiB a rank: stages of ") and "1 block recomputed" in text
    assert "fullest rank 70.0 MiB, step 20.0 ms (25.0 ms with an even cut)" in text
    assert "(no even cut fits)" in planned(replace(JOINT, cuts_first_ms=None))


@pytest.mark.parametrize(
    ("bound", "proof"),
    [
        (20.0, "no plan below the cap is quicker."),
        (16.0, "at most 20.0 % of this step could be saved."),
        (0.0, "plans. "),
    ],
)
def test_what_is_proven(bound: float, proof: str) -> None:
    assert planned(replace(JOINT, bound_ms=bound)).endswith(proof)


def test_a_run_keeps_the_cap_or_says_which_rank_does_not() -> None:
    run = pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN))
    most = fullest_bytes(run.memory)
    assert most is not None
    kept, missed = (replace(JOINT, cap_bytes=cap) for cap in (most, most - 1))
    assert cap_kept(run, kept) and cap_outcome(run, kept).startswith("cap ") and " kept: " in cap_outcome(run, kept)
    assert cap_kept(run, missed) is False and " missed: rank " in cap_outcome(run, missed)
    unmeasured = rank_memory(0, "measured", [], parameter_bytes=0, receive_bytes=0)
    for memory in ((), (unmeasured,)):
        blind = replace(run, memory=memory)
        assert cap_kept(blind, missed) is None and cap_outcome(blind, missed) == ""


def test_every_schedule_is_explained() -> None:
    assert all(schedule.name in words.SCHEDULE for schedule in SCHEDULES.values())
