"""Where a recompute first makes another tensor than forward: operator, block, and line of the model's file."""

from __future__ import annotations

import itertools
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
        if self.kind == "last" and STATE["calls"] > 1:
            return y.sin() * 3.0  # departs: last
        return y.sin() * 2.0


def net(kind: str) -> tuple[nn.Module, Tensor]:
    STATE["calls"] = 0
    return nn.Sequential(nn.Linear(4, 4), Block(kind)), torch.randn(8, 4)


def line_of(kind: str) -> str:
    numbers = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# departs: {kind}")]
    return f"{Path(__file__).name}:{numbers[0]}"


@pytest.mark.parametrize(
    ("kind", "reentrant"),
    [
        *itertools.product(["counter", "python", "branch", "dropout", "nothing"], [False, True]),
        ("last", True),  # without reentrant checkpointing a rerun ends before
    ],
)
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


class Unlike(nn.Module):
    """Does other work when it runs again: other rows, another type, fewer operators, more of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind, self.n_calls = nn.Linear(4, 4), kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        is_first = self.n_calls == 1
        y = self.fc(x)  # departs: fewer
        if self.kind == "rows" and not is_first:
            y = y[:3].clone()  # departs: rows
        if self.kind == "type" and not is_first:
            y = y.bfloat16()  # departs: type
        if self.kind == "more" and not is_first:
            y = torch.cat([y, y])  # departs: more
        if self.kind == "fewer" and is_first:
            y = y.sin()
        return y.sin().float().sum(0, keepdim=True) + 0.0 * x


def unlike(kind: str) -> tuple[nn.Module, Tensor, Callable[[], None]]:
    block, x = Unlike(kind), torch.randn(8, 4, requires_grad=True)
    run: Callable[..., Tensor] = checkpoint
    return block, x, lambda: run(block, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("instrument", ["record_step", "watch of this step", "watch of another step", "caught"])
@pytest.mark.parametrize("kind", ["rows", "type", "fewer", "more"])
def test_torchs_own_error_in_a_users_loop_gets_one_note_with_the_line(kind: str, instrument: str) -> None:
    """The exception stays torch's own: its kind, its text and its arguments."""
    with pytest.raises(CheckpointError) as plain:
        unlike(kind)[2]()
    model, _, step = unlike(kind)
    with pytest.raises(CheckpointError) as caught:
        if instrument == "record_step":
            with explorer.record_step(model):
                step()
        elif instrument == "caught":
            watch = explorer.watch(model, at=(9,))
            try:
                step()
            except CheckpointError as error:
                watch.refused(error)
                watch.refused(error)
                watch.close()
                raise
        else:
            with explorer.watch(model, at=(1 if instrument == "watch of this step" else 9,)):
                step()
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == 1 and line_of(kind) in notes[0], notes
    assert (type(caught.value), caught.value.args) == (type(plain.value), plain.value.args)


@pytest.mark.parametrize("kind", ["counter", "python", "dropout", "rows", "nothing"])
def test_judge_names_the_line_at_which_the_candidates_recompute_departs(kind: str) -> None:
    """In a cause, or in the reason why the candidate did not run; of equal steps there is nothing to say."""
    STATE["calls"] = 0
    block, x = Unlike(kind) if kind == "rows" else Block(kind), torch.randn(8, 4)
    run: Callable[..., Tensor] = checkpoint

    def kept(model: nn.Module, batch: Tensor) -> None:
        reset(model)
        model(batch).sum().backward()

    def recomputed(model: nn.Module, batch: Tensor) -> None:
        reset(model)
        run(model, batch.requires_grad_(), use_reentrant=False, preserve_rng_state=False).sum().backward()

    def reset(model: nn.Module) -> None:
        STATE["calls"] = 0
        random.seed(0)
        if isinstance(model, Unlike):
            model.n_calls = 0

    verdict = explorer.judge(kept, recomputed, block, x)
    text = repr(verdict)
    assert ("departs from forward" in text) is (kind != "nothing"), text
    if kind != "nothing":
        assert line_of(kind) in text and verdict.verdict in ("different", "not comparable")
