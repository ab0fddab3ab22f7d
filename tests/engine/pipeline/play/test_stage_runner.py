"""One stage doing its actions, its backward whole or in two."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.run import run_pipeline
from explorer.plan.hazards.hazards import hazards
from explorer.record.policy import Policy
from tests.engine.pipeline.pipeline_nets import CARRYING, LANGUAGE
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import SOME, assert_split_is_exact


def test_behind_a_frozen_stage_a_split_backward_loses_what_the_hazard_says() -> None:
    plan = spec("language", LANGUAGE, 4, schedule="ZBVZeroBubble")
    assert plan.plan is not None
    graph = describe(plan.model)
    still = msgspec.structs.replace(plan, frozen=plan.plan.stages[0])  # the positions train before the first cut
    assert "lost-gradients" not in {one.rule for one in hazards(graph, plan.policy, plan.plan, still)}
    assert not run_pipeline(still).moved
    frozen = msgspec.structs.replace(plan, frozen=(*plan.plan.stages[0], "positions"))
    fired = {one.rule: one for one in hazards(graph, plan.policy, plan.plan, frozen)}
    assert fired["lost-gradients"].severity == "error"
    run = run_pipeline(frozen)
    assert run.failure is None
    lost = {shares.name for shares in run.gradients if shares.splitting.presence == "baseline only"}
    assert lost, "torch finds the way to the weights from the stage's input, which needs no gradient"
    assert {shares.name for shares in run.moved} == lost
    assert {name.rpartition(".")[0] for name in lost} <= set(fired["lost-gradients"].blocks)
    whole = run_pipeline(
        msgspec.structs.replace(frozen, plan=msgspec.structs.replace(plan.plan, schedule="Interleaved1F1B"))
    )
    assert not whole.moved


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "1F1B"])
def test_what_blocks_hand_on_can_be_read_again_after_a_split_backward(schedule: str) -> None:
    """torch's I detaches in place what a stage sends; a checkpoint of the stage reads it once more in W."""
    run = run_pipeline(spec("carrying", CARRYING, 4, Policy.recompute(CARRYING), schedule=schedule))
    assert_split_is_exact(run)


def test_a_split_backward_multiplies_recompute_and_warns() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 4, SOME, schedule="ZBVZeroBubble"))
    multipliers = {block.fqn: block.multiplier for block in run.blocks}
    assert multipliers["tokens"] == 1.0
    assert multipliers["blocks.2"] > 2.0
    assert any("splits the backward" in note for note in run.notes)
