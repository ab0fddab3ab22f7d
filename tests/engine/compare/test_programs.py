"""Two programs over the same parameters: yardsticks come from the reference, the verdict says what parts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.compare.programs import judged_programs
from explorer.engine.compare.step_program import StepProgram

BATCH = torch.linspace(-1, 1, 6).reshape(2, 3)


def step(model: nn.Module, batch: Any) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def doubled(model: nn.Module, batch: Any) -> Tensor:
    loss = 2 * model(batch).square().mean()
    loss.backward()
    return loss


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("no such kernel")


def judged(reference: Any, candidate: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    programs = [StepProgram(one, model, BATCH, ("weight", "bias")) for one in (reference, candidate)]
    return judged_programs(*programs)


def test_a_program_equals_itself_and_has_a_reference() -> None:
    fields = judged(step, step)
    assert (fields["reproducible"], fields["reference"], fields["loss_equal"]) == (True, "float64", True)
    assert [diff.verdict for diff in fields["gradients"]] == ["bitwise equal"] * 2


def test_twice_the_loss_is_another_program() -> None:
    fields = judged(step, doubled)
    assert fields["loss_equal"] is False
    assert [(diff.verdict, diff.norm_ratio) for diff in fields["gradients"]] == [("different", 2.0)] * 2


def test_what_the_candidate_raises_is_a_failure_and_what_the_reference_raises_passes() -> None:
    fields = judged(step, fails)
    assert "no such kernel" in fields["failure"].sentence and fields["reference"] == "float64"
    with pytest.raises(ValueError, match="no such kernel"):
        judged(fails, step)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_is_watched_where_hooks_run_and_not_in_compiled_code(compiled: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 2))
    if compiled:
        model[0].compile(backend="eager")
    programs = [StepProgram(one, model, BATCH, ("0.weight", "0.bias")) for one in (step, doubled)]
    forward = judged_programs(*programs)["forward"]
    assert forward is None if compiled else forward.same and forward.order == ("", "0")
