"""The checkpoints of lessons: a written-out one from a snapshot, and a mode that flips before the recompute."""

from __future__ import annotations

import pytest
import torch

from explorer.engine.state.rng import RngState
from explorer.lab.kit.bench import LabBench, gradients_of, mean_square, step_gradients
from explorer.lab.kit.checkpoints import CHECKPOINTS, ENGINES, WrittenOutCheckpoint, engine_policy, flip_row
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


@pytest.mark.parametrize("layer", ["dropout", "batchnorm"])
@pytest.mark.parametrize("label", CHECKPOINTS)
def test_without_a_flip_it_is_bitwise_equal(label: str, layer: str) -> None:
    assert flip_row(LabBench(), label, layer, "never").outcome == "bitwise equal"


@pytest.mark.parametrize("label", CHECKPOINTS)
def test_a_flip_before_the_recompute_is_never_equal(label: str) -> None:
    assert flip_row(LabBench(), label, "dropout", "between").outcome != "bitwise equal"
