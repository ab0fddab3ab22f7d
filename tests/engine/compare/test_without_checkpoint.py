"""A model's own checkpoint may be what is wrong: a third run without any checkpoint says which side differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.engine.compare.compare import with_causes
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.spec_program import SpecProgram
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state
from explorer.plan.why.checkpointing import moved_in, sides
from explorer.record.checkpointing import CheckpointRegion, OwnCheckpointing, WithoutCheckpoint
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.view.compare.gradients import verdict_sentence
from tests.engine.judging import WHERE

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

NETS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if kind == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.5 if "forgets" in kind else 0.0)
        self.n_calls = 0
        self.kind = kind

    def forward(self, x):
        self.n_calls += self.kind == "counts"
        return torch.tanh(self.drop(self.norm(self.linear(x))))


class Helper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_(True)
        with torch.enable_grad():
            out = ctx.run(x)
        return None, *torch.autograd.grad(out, [x, *ctx.parameters], gradient)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.entry = kind, nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.entry.requires_grad_(kind != "dead")

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            if self.kind == "helper":
                x = Helper.apply(block, x, *block.parameters())
            else:
                keeps = self.kind != "forgets"
                x = checkpoint(block, x, use_reentrant=self.kind == "dead", preserve_rng_state=keeps)
        return self.head(x)


def build(kind):
    torch.manual_seed(0)
    return Net(kind), (torch.randn(5, 6), torch.randn(5, 1)), nn.functional.mse_loss
"""


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    (tmp_path / "nets.py").write_text(NETS)

    def judge(kind: str, *, is_known: bool = True) -> Comparison:
        model = ModelRef(target=f"{tmp_path}/nets.py:build", arguments={"kind": kind})
        baseline = RunSpec(model=model, n_repeats=0)
        candidate = replace(baseline, policy=Policy.recompute(("blocks.0", "blocks.1")))
        region = CheckpointRegion(caller="", blocks=("blocks.0",), reentrant=False, n_calls=1)
        own = OwnCheckpointing(regions=(region,) if is_known else ())
        runs = [Measurement(spec=spec, environment=WHERE, own_checkpointing=own) for spec in (baseline, candidate)]
        with preserve_global_state(), deterministic_kernels():
            program = SpecProgram(baseline, load_for(baseline))
            comparison = Comparison(baseline=runs[0], candidate=runs[1])
            return with_causes(judge_programs(comparison, program, program.under(candidate)))

    return judge


def test_a_policy_that_cures_the_models_own_checkpoint_is_not_accused(compared: Any) -> None:
    """Statistics move twice a step in the baseline, and once under the policy as without any checkpoint."""
    comparison = compared("norm")
    plain = comparison.without_checkpoint
    assert comparison.verdict == "state moved" and moved_in(comparison) == "the baseline alone"
    assert plain.candidate == () and "blocks.0.norm.running_mean" in plain.baseline
    assert verdict_sentence(comparison).startswith("gradients equal, state moved twice in the baseline alone: ")
    (sentence,) = sides(comparison)
    assert sentence.startswith("The baseline differs from the same step without any checkpoint in blocks.0.norm.")


def test_both_sides_may_be_wrong_alike_or_more(compared: Any) -> None:
    comparison = compared("counts")
    plain = comparison.without_checkpoint
    assert set(plain.baseline) == set(plain.candidate) == {"blocks.0.n_calls", "blocks.1.n_calls"}
    assert moved_in(comparison) in ("", "both sides")
    assert any(sentence.startswith("Both sides differ") for sentence in sides(comparison))


def test_gradients_that_the_models_own_helper_spoils_in_both_runs_are_named(compared: Any) -> None:
    comparison = compared("forgets")
    assert "blocks.0.linear.weight" in comparison.without_checkpoint.baseline
    assert any("the model's own checkpointing does it" in sentence for sentence in sides(comparison))


def test_gradients_that_are_missing_in_both_runs_are_in_the_verdict(compared: Any) -> None:
    comparison = compared("dead")
    lost = {f"blocks.{i}.linear.{name}" for i in range(2) for name in ("weight", "bias")}
    assert comparison.verdict == "not comparable" and set(comparison.untrained) == lost
    assert set(comparison.without_checkpoint.baseline) == set(comparison.without_checkpoint.candidate) == lost
    assert verdict_sentence(comparison).startswith(
        "not comparable: The model's own checkpoint loses the gradients of 4 of 6 trainable parameters"
    )
    unused = replace(comparison, without_checkpoint=WithoutCheckpoint())
    assert unused.verdict == "bitwise equal", "a parameter that no step uses is no fault of a checkpoint"
    assert next(sides(comparison)).startswith("4 of 6 trainable parameters get no gradient in the baseline: blocks.0.")
    assert comparison.headlines()["n_untrained"] == 4


def test_a_good_checkpoint_and_none_at_all_leave_nothing_to_say(compared: Any) -> None:
    plain = compared("plain").without_checkpoint
    assert (plain.baseline, plain.candidate) == ((), ()) and not list(sides(compared("plain")))
    assert compared("norm", is_known=False).without_checkpoint is None


def test_a_helper_without_a_switch_cannot_be_turned_off(compared: Any) -> None:
    assert compared("helper").without_checkpoint is None
