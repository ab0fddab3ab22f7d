"""Where a recompute first makes another tensor than forward: operator, block, and line of the model's file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import explorer
from explorer.engine.compare.compare import compare
from explorer.engine.compare.watched import RerunWatch
from explorer.engine.policy.apply import apply_policy
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

SOURCE = Path(__file__).read_text().splitlines()
STATE = {"calls": 0}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        STATE["calls"] += 1
        if self.kind == "counter":
            y = y * (1.0 + STATE["calls"])  # departs: counter
        if self.kind == "python":
            y = y * (2.0 + random.random())  # departs: python
        if self.kind == "branch" and STATE["calls"] % 2 == 0:
            y = y.exp()  # departs: branch
        if self.kind == "dropout":
            y = nn.functional.dropout(y)  # departs: dropout
        return y.sin() * 2.0


def net(kind: str) -> tuple[nn.Module, Tensor]:
    STATE["calls"] = 0
    return nn.Sequential(nn.Linear(4, 4), Block(kind)), torch.randn(8, 4)


def line_of(kind: str) -> str:
    numbers = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# departs: {kind}")]
    return f"{Path(__file__).name}:{numbers[0]}"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["counter", "python", "branch", "dropout", "nothing"])
def test_the_first_operator_and_its_line_are_named(kind: str, reentrant: bool) -> None:
    model, x = net(kind)
    policy = Policy.recompute(["1"], use_reentrant=reentrant, preserve_rng_state=False)
    watch = RerunWatch(model, policy)
    with apply_policy(model, policy), watch:
        try:
            model(x).sum().backward()
        except CheckpointError:
            assert kind == "branch"
    departures = list(watch.departures.by_block.values())
    if kind == "nothing":
        assert not departures
        return
    assert (departures[0].block, departures[0].line) == ("1", line_of(kind)), departures
    assert line_of(kind) in departures[0].sentence


@pytest.mark.parametrize("kind", ["counter", "branch"])
def test_a_comparison_names_the_line_in_a_cause_or_in_the_failure(kind: str) -> None:
    spec = RunSpec(model=ModelRef(target=f"{__file__}:net", arguments={"kind": kind}), n_repeats=0)
    comparison = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=Policy.recompute(["1"])))
    failure = comparison.failure.sentence if comparison.failure else ""
    assert any(line_of(kind) in text for text in (*comparison.causes, failure)), (comparison.causes, failure)


def test_an_audit_names_the_line_of_the_models_own_checkpoint() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block("counter")

        def forward(self, x: Tensor) -> Tensor:
            run: Callable[..., Tensor] = checkpoint
            return run(self.block, x, use_reentrant=False)

    model, x = Net(), torch.randn(8, 4)
    result = explorer.audit(model, lambda: model(x).sum().backward())
    assert line_of("counter") in result.departure and result.departure in repr(result)
