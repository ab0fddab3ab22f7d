"""What cannot be watched, copied or trained is refused in a sentence before torch says it in other words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from explorer.engine.bench.step import prepare, run_step
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, ModelFailed, ModelNotLoaded
from explorer.plan.policy.presets import preset
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine.graphs import graph_of

CANNOT_BE_OPENED = """
import torch, warnings
from torch import nn
def lazy():
    return nn.Sequential(nn.LazyLinear(3), nn.LazyConv1d(2, 1)), torch.ones(2, 4)
def warmed():
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.ones(2, 4))
    return model, torch.ones(2, 4)
def scripted():
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), torch.ones(2, 4)
def old_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), torch.ones(2, 4)
def sparse():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)), torch.tensor([1, 2])
"""


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    path = tmp_path / "closed.py"
    path.write_text(CANNOT_BE_OPENED)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("factory", "words", "hint"), [
    ("lazy", r"without a shape: 0\.weight, 0\.bias, 1\.weight and 1 more", "once before the factory returns"),
    ("scripted", r"torch\.jit compiled: 1\.", r"before torch\.jit\.script"),
])  # fmt: skip
def test_models_that_cannot_be_watched_say_why_and_what_next(closed: Path, factory: str, words: str, hint: str) -> None:
    with pytest.raises(ModelNotLoaded, match=f"{words}.*{hint}"):
        load(ModelRef(target=f"{closed}:{factory}"))


@pytest.mark.filterwarnings("ignore")
def test_what_can_be_opened_is_opened(closed: Path) -> None:
    assert describe(ModelRef(target=f"{closed}:warmed")).by_fqn["0"].parameter_bytes == 60
    graph = describe(ModelRef(target=f"{closed}:old_norm"))
    assert graph.chain == ("0", "1") and preset("all", graph).blocks
    spec = RunSpec(model=graph.model, policy=Policy.recompute(["0"]), optimizer="adamw")
    with preserve_global_state():
        assert run_step(prepare(spec)) > 0
    with pytest.raises(ModelFailed, match=r"weight_norm keeps a computed weight in 0.*parametrizations\.weight_norm"):
        graph_of(load(graph.model).model, torch.ones(2, 4))


def test_a_sparse_gradient_needs_another_optimizer(closed: Path) -> None:
    spec = RunSpec(model=ModelRef(target=f"{closed}:sparse"))
    with preserve_global_state():
        with pytest.raises(BadInput, match=r"gradient of 0 is sparse.*AdamW.*sgd.*sparse=False"):
            prepare(spec)
        assert run_step(prepare(msgspec.structs.replace(spec, optimizer="sgd"))) > 0
        assert run_step(prepare(msgspec.structs.replace(spec, frozen=("0",)))) > 0
