"""What can be cut and what cannot, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.model.load import load
from explorer.engine.pipeline.cut.build import build
from explorer.engine.pipeline.cut.tape import record
from explorer.errors import InvalidPlan
from explorer.record.graph import ModelRef
from tests.engine.pipeline.cut.taped import taped
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import NETS, spec


def test_blocks_are_steps_and_what_lies_between_is_functions() -> None:
    _, tape = taped("language", LANGUAGE)
    names = [step.name for step in tape.steps if isinstance(step.target, str)]
    assert names == ["tokens", "dropout", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert {path for step in tape.steps for path in step.paths} == {"positions"}


def test_recording_leaves_no_hooks() -> None:
    loaded = load(ModelRef(target=f"{NETS}:language"))
    record(loaded.model, loaded.inputs, LANGUAGE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


@pytest.mark.parametrize(
    ("net", "stages", "words"),
    [
        ("deciding", (("first",), ("second",)), "reads a tensor's value (__bool__) after first"),
        ("repeating", (("first",), ("second",)), "first of stage 0 runs after stage 1 has begun"),
        ("language", (("tokens", "blocks.0"), ("blocks.9",)), "'blocks.9' is not in the model"),
        ("language", (("tokens", "blocks.0"), ("blocks.0",)), "'blocks.0' is named twice"),
        ("language", (("tokens", "blocks.0"), ("blocks.0.wide",)), "'blocks.0.wide' lies inside 'blocks.0'"),
    ],
)
def test_an_unsupported_split_says_why(net: str, stages: tuple[tuple[str, ...], ...], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        build(spec(net, ("x",), 1, stages=stages, n_microbatches=2))
    assert words in str(caught.value)


def test_an_object_in_which_tensors_may_hide_is_refused() -> None:
    class Cache:
        pass

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Cell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, cache=Cache())

    class Cell(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x * 2

    with pytest.raises(InvalidPlan, match="hold a Cache"):
        record(Cached(), torch.ones(2), ("block",))
