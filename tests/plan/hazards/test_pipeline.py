"""Traps of a split backward, said before the run."""

from __future__ import annotations

import pytest

from explorer.plan.hazards.hazards import hazards
from explorer.record import KEEP_ALL, ModelRef, Policy, RunSpec, Unit
from explorer.record.run import PipelinePlan
from tests import graphs, pipelines

GRAPH = graphs.gpt(6)


def fired(plan: PipelinePlan, policy: Policy = KEEP_ALL, **spec: object) -> set[str]:
    asked = RunSpec(model=ModelRef(target="m.py"), policy=policy, plan=plan, **spec)  # type: ignore[arg-type]
    return {hazard.rule for hazard in hazards(GRAPH, policy, plan, asked)}


@pytest.mark.parametrize(("schedule", "lost"), [("ZBVZeroBubble", True), ("Interleaved1F1B", False)])
def test_behind_frozen_stages_a_split_backward_loses_gradients(schedule: str, lost: bool) -> None:
    plan = pipelines.planned(GRAPH, 4, schedule=schedule)
    assert ("lost-gradients" in fired(plan, frozen=plan.stages[0])) == lost
    assert "lost-gradients" not in fired(plan)
    assert "lost-gradients" not in fired(plan, frozen=plan.stages[0][:1])


@pytest.mark.parametrize(("schedule", "raises"), [("InterleavedZeroBubble", True), ("1F1B", False)])
def test_saved_operators_are_handed_out_once(schedule: str, raises: bool) -> None:
    unit = Unit(blocks=("blocks.1",), action="save_ops", save_ops=("aten.mm.default",))
    plan = pipelines.planned(GRAPH, 4, schedule=schedule)
    assert ("saved-ops-split" in fired(plan, Policy(units=(unit,)))) == raises


def test_an_idle_rank_is_said() -> None:
    plan = PipelinePlan(stages=(GRAPH.chain,), n_microbatches=1, actions=(("0F0", "0B0"), ()))
    assert "idle-rank" in fired(plan)
