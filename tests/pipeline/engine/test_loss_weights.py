"""Weights that a loss function holds lie on the rank that takes the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from explorer.pipeline.engine.build import build
from explorer.record.graph import ModelRef
from explorer.record.run import PipelinePlan, RunSpec

NET = """
import torch
from torch import nn

def build(held):
    torch.manual_seed(0)
    model, compared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 100)
    losses = {
        "none": lambda out, targets: (out - targets).square().mean(),
        "network": lambda out, targets: (compared(out) - compared(targets)).square().mean(),
        "model": lambda out, targets: (out - targets).square().mean() + model[0].weight.square().sum(),
    }
    return model, (torch.randn(4, 8), torch.randn(4, 8)), losses[held]
"""


@pytest.mark.parametrize(("held", "more"), [("none", 0), ("network", 4 * (8 * 100 + 100)), ("model", 0)])
def test_the_last_stage_holds_the_weights_of_the_loss(held: str, more: int, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    plan = PipelinePlan(stages=(("0",), ("1",)), n_microbatches=2, schedule="GPipe")
    pipeline = build(RunSpec(model=ModelRef(target=f"{tmp_path / 'net.py'}", arguments={"held": held}), plan=plan))
    of_a_layer = sum(parameter.nbytes for parameter in nn.Linear(8, 8).parameters())
    assert [pipeline.static_bytes(rank) for rank in range(2)] == [of_a_layer, of_a_layer + more]
    assert [stage.parameter_bytes for stage in pipeline.stages()] == [of_a_layer, of_a_layer + more]
