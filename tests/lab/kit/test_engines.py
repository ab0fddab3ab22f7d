"""The written-out checkpoint: right where its snapshot is taken before the block, and without a graph behind it."""

from __future__ import annotations

import pytest
import torch

from explorer.engine.world.rng import RngState
from explorer.lab.kit.bench import gradients_of, mean_square, step_gradients
from explorer.lab.kit.engines import CHECKPOINTS, ENGINES, WrittenOutCheckpoint, engine_policy
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped
from explorer.lab.kit.rows import gap
from explorer.record.policy import KEEP_ALL


@pytest.mark.parametrize(("snapshot", "outcome"), [(True, "bitwise equal"), (False, "different")])
def test_a_rerun_from_a_snapshot_draws_the_masks_of_forward(snapshot: bool, outcome: str) -> None:
    torch.manual_seed(3)
    block, x = Dropped(0.5), torch.randn(BATCH, WIDTH)
    expected = step_gradients(block, x)
    block.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    before = RngState.capture(block) if snapshot else None
    mean_square(WrittenOutCheckpoint.apply(block, before, x.requires_grad_())).backward()
    assert gap(expected, gradients_of(block)).outcome == outcome
    forward, rerun = block.dropout.masks[-2:]
    assert torch.equal(forward, rerun) == snapshot


def test_every_engine_is_a_policy_and_only_keep_recomputes_nothing() -> None:
    assert {engine for engine in ENGINES if engine_policy(engine, ["block0"]) == KEEP_ALL} == {"keep"}
    assert {*ENGINES} - {"keep"} < {*CHECKPOINTS}
    assert engine_policy("reentrant", ["block0"]).use_reentrant
