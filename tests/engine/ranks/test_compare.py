"""Verdicts on sharded steps of real gloo ranks: what is equal, what only rounds, and splits that lose gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ranks import MODELS, SPLITS
from explorer.engine.ranks.compare import compare_ranks
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.ranks import Ranks
from explorer.record.run import RunSpec

WRONG = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def forgets_to_sum(model, mesh):
    pass


def freezes(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.down.requires_grad_(False)
"""
LAYERS = Policy.recompute([f"layers.{i}" for i in range(4)])
BLOCKS = Policy.recompute(["blocks.0", "blocks.2"])


def compared(model: str, ranks: Ranks, policy: Policy = KEEP_ALL) -> Comparison:
    return compare_ranks(RunSpec(model=ModelRef(target=f"{MODELS}:{model}"), policy=policy, ranks=ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "split", "policy", "verdict"),
    [
        ("picture", "ddp", BLOCKS, "bitwise equal"),
        ("tied", "fsdp", LAYERS, "bitwise equal"),
        ("transformer", "tp", LAYERS, "rounding"),
        ("transformer", "fsdp-tp", KEEP_ALL, "rounding"),
    ],
)
def test_a_sharded_step_is_the_unsharded_one(model: str, split: str, policy: Policy, verdict: str) -> None:
    """Two summands have one order, so gradients of two ranks are equal bit by bit; a split product rounds."""
    of = compared(model, SPLITS[split], policy)
    assert of.verdict == verdict and of.failure is None
    assert of.n_gradients == len(of.gradients) > 20 and of.n_steps == 2
    assert of.candidate.spec.ranks == SPLITS[split] and of.baseline.spec.ranks is None
    assert of.candidate.step_peak_bytes and of.baseline.step_peak_bytes


@pytest.mark.slow
def test_gradients_that_are_never_summed_or_lost_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    alone = compared("picture", Ranks(n_ranks=2, data="none", parallelize=f"{path}:forgets_to_sum"))
    assert alone.verdict == "different" and alone.n_bitwise_equal == 0
    lost = compared("picture", Ranks(n_ranks=2, data="none", n_tensor=2, parallelize=f"{path}:freezes"))
    assert lost.verdict == "different"
    assert [one.name for one in lost.gradients if one.presence == "baseline only"] == ["down.weight", "down.bias"]
    assert any("down.weight" in cause for cause in lost.causes)
