"""torch's word about a recompute that differs, in words: block, operator, both shapes, usual cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import explorer
from explorer.engine.bench.measure import measure
from explorer.engine.watch.checkpoint_error import BRANCH, CACHE, TOKENS, TYPES, in_words
from explorer.record import ModelRef, Policy, RunSpec


class Block(nn.Module):
    """Does something else each time, as `change` says."""

    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.change, self.n_calls = change, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return self.down(torch.tanh(self.change(self.n_calls, self.up(x)))).sum(dim=(0, 1), keepdim=True)


class Net(nn.Module):
    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Block(change)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)  # type: ignore[no-any-return]


CHANGES = {
    "cache": (lambda n, x: torch.cat([x] * n, dim=1), "(2, 4, 16)", "(2, 8, 16)", CACHE),
    "tokens": (lambda n, x: x[: 3 - n], "(2, 4, 16)", "(1, 4, 16)", TOKENS),
}


def failed(change: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[CheckpointError, nn.Module]:
    model = Net(change)
    loss = model(torch.randn(2, 4, 8)).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    return caught.value, model


@pytest.mark.parametrize("name", ["cache", "tokens"])
def test_block_operator_both_shapes_and_the_usual_cause_are_named(name: str) -> None:
    change, forward, again, cause = CHANGES[name]
    sentence = in_words(*failed(change))
    assert sentence.startswith("The recompute of blocks.1 made another tensor than forward: ")
    assert "aten." in sentence and "returned in blocks.1" in sentence
    assert f"was {forward} float32 in forward and {again} float32 in the recompute" in sentence and cause in sentence


def test_another_number_format_is_told_from_another_shape() -> None:
    sentence = in_words(*failed_by_a_cast())
    assert TYPES in sentence and "float32" in sentence and "bfloat16" in sentence


def failed_by_a_cast() -> tuple[CheckpointError, nn.Module]:
    def cast(n: int, x: torch.Tensor) -> torch.Tensor:
        return x if n == 1 else x.bfloat16()

    class Tanh(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n_calls += 1
            return torch.tanh(self.change(self.n_calls, self.up(x))).float().sum(dim=(0, 1), keepdim=True)

    model = Net(cast)
    model.blocks[1] = Tanh(cast)
    loss = model(torch.randn(2, 4, 8)).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    return caught.value, model


def test_another_number_of_tensors_is_a_branch() -> None:
    sentence = in_words(*failed(lambda n, x: x.exp().sin() if n == 1 else x))
    assert "forward saved" in sentence and BRANCH in sentence and "blocks.1" in sentence


def test_it_stands_in_a_recorded_step_and_on_the_error_itself() -> None:
    model = Net(CHANGES["cache"][0])
    with pytest.raises(CheckpointError) as caught, explorer.record_step(model) as run:
        model(torch.randn(2, 4, 8)).sum().backward()
    assert run.measurement.failure is not None and CACHE in run.measurement.failure.sentence
    assert caught.value.__notes__ == [run.measurement.failure.sentence]


def test_other_errors_are_left_alone() -> None:
    assert in_words(RuntimeError("tensor at position 3"), nn.Linear(1, 1)) == ""


def test_it_stands_in_a_measured_run(tmp_path: Path) -> None:
    (tmp_path / "grows.py").write_text(GROWS)
    run = measure(RunSpec(model=ModelRef(target=f"{tmp_path}/grows.py"), policy=Policy.recompute(["1"]), n_repeats=0))
    assert run.failure is not None and CACHE in run.failure.sentence and "returned in 1" in run.failure.sentence


GROWS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.kept = []

    def forward(self, x):
        self.kept.append(self.up(x).detach())
        return (torch.cat(self.kept, 1).tanh() * x.sum()).sum(1, keepdim=True)

def build():
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1)), torch.randn(2, 4, 8)
"""
