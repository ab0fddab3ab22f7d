"""Stages of models that do not let themselves be divided: one sentence, with a reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.cut.build import build
from explorer.errors import InvalidPlan
from explorer.plan.pipeline.cuts import stages_by
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec
from tests.engine.pipeline.plans import spec

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.first, self.second, self.turn = nn.Linear(4, 4), nn.Linear(4, 4), turn

    def forward(self, x):
        return self.turn(self, x)


def fixed():
    return Net(lambda net, x: net.second(net.first(x).view(8, 2, 2).flatten(1))), torch.randn(8, 4)


def again():
    return Net(lambda net, x: net.first(net.second(net.first(x)))), torch.randn(8, 4)
"""


def asked(name: str, folder: Path, n_microbatches: int) -> RunSpec:
    (folder / "net.py").write_text(SOURCE)
    plan = spec("x", ("first", "second"), 2, n_microbatches=n_microbatches)
    return msgspec.structs.replace(plan, model=ModelRef(target=f"{folder / 'net.py'}:{name}"))


def test_a_batch_size_written_into_the_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="raised RuntimeError on one of 2 microbatches: shape .* is invalid") as told:
        build(asked("fixed", tmp_path, 2))
    assert "written into the model" in (told.value.hint or "")
    assert len(build(asked("fixed", tmp_path, 1)).parts) == 2


def test_too_many_stages_say_why_there_are_no_more_places(tmp_path: Path) -> None:
    graph = describe(asked("again", tmp_path, 1).model)
    with pytest.raises(InvalidPlan, match=r"2 stages are asked, and .* can be cut into 1 at most: .*again"):
        stages_by("by-parameters", graph, 2)
