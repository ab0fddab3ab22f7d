"""Segments over several blocks: one checkpoint within a stage, refused across a cut."""

from __future__ import annotations

import pytest

from explorer.engine.pipeline.cut.build import build
from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import InvalidPlan
from explorer.record.policy import Policy, Unit
from tests.engine.pipeline.pipeline_nets import CHAIN, LANGUAGE, SCALING
from tests.engine.pipeline.plans import spec

PAIRS = Policy.recompute([("layers.0", "layers.1"), ("layers.3", "layers.4")])
STAGES = (CHAIN[:3], CHAIN[3:])


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_segment_is_one_checkpoint_and_moves_no_bit(schedule: str) -> None:
    run = run_pipeline(spec("chain", CHAIN, 2, PAIRS, stages=STAGES, schedule=schedule), "replay")
    assert run.failure is None
    assert [s.name for s in run.gradients if not (s.recompute.bitwise and s.splitting.bitwise)] == []
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls == {fqn: (4, 4 if fqn in PAIRS.blocks else 0) for fqn in CHAIN}


def test_except_last_spares_the_last_microbatch_of_a_segment() -> None:
    run = run_pipeline(spec("chain", CHAIN, 2, PAIRS, stages=STAGES, checkpoint="except_last"))
    assert {block.n_recompute for block in run.blocks if block.fqn in PAIRS.blocks} == {3}
    assert all(s.splitting.bitwise for s in run.gradients)


@pytest.mark.parametrize(("net", "blocks"), [("language", LANGUAGE), ("scaling", SCALING)])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_segment_of_a_list_is_one_checkpoint_of_its_stage(net: str, blocks: tuple[str, ...], checkpoint: str) -> None:
    policy = Policy.recompute([("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")])
    run = run_pipeline(spec(net, blocks, 2, policy, checkpoint=checkpoint), "replay")
    assert run.failure is None
    assert [s.name for s in run.gradients if not (s.recompute.bitwise and s.splitting.bitwise)] == []
    n_again = 4 if checkpoint == "always" else 3
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls == {fqn: (4, n_again if fqn in policy.blocks else 0) for fqn in blocks}


def test_a_cut_through_a_segment_of_a_list_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"blocks.1\+blocks.2 is cut.*Cut between"):
        build(spec("scaling", SCALING, 2, Policy.recompute([("blocks.1", "blocks.2")])))


def test_a_segment_saves_more_than_its_blocks_alone() -> None:
    """Only its input is kept, so it is not the blocks that are checkpointed one by one."""
    alone = Policy.recompute(PAIRS.blocks)
    runs = [
        run_pipeline(spec("chain", CHAIN, 2, policy, stages=STAGES, arguments={"batch": 4096}))
        for policy in (alone, PAIRS)
    ]
    levels = [{name: run.memory[0].held_bytes[i] for i, name in _ends(run.memory[0])} for run in runs]
    assert levels[1]["0F3"] < levels[0]["0F3"]


def _ends(memory):  # noqa: ANN001, ANN202
    return [(i, memory.actions[a]) for i, a in enumerate(memory.action) if a >= 0]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy.recompute([("layers.2", "layers.3")]), r"layers.2\+layers.3 is cut"),
        (Policy.recompute(["layers"]), "layers holds 6 blocks of the stages"),
        (Policy(units=(Unit(blocks=("",)),)), "the model holds 7 blocks"),
    ],
)
def test_what_does_not_fit_the_stages_is_refused(policy: Policy, words: str) -> None:
    with pytest.raises(InvalidPlan, match=words):
        build(spec("chain", CHAIN, 2, policy, stages=STAGES))


def test_units_inside_a_block_are_carried_out() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 2, Policy.recompute(["blocks.1.wide"])))
    assert {block.fqn: block.n_recompute for block in run.blocks}["blocks.1"] == 4
    assert all(s.splitting.bitwise for s in run.gradients)
