"""Programs start from one state, and two programs over the same parameters are judged by the reference's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.outcome import Outcome, outcome_of
from explorer.engine.compare.programs import Step, StepProgram, step_programs, whole
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec
from tests.engine.judging import WHERE

BATCH = torch.linspace(-1, 1, 6).reshape(2, 3)


def squares(model: nn.Module, batch: Any) -> Tensor:
    loss = model(batch).square().sum()
    loss.backward()
    return loss


def doubled(model: nn.Module, batch: Any) -> Tensor:
    loss = 2 * model(batch).square().sum()
    loss.backward()
    return loss


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("no such kernel")


def sgd(model: nn.Module, batch: Any) -> None:
    """A step with torch's own optimizer, which zeroes nothing before its end."""
    squares(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def outcomes(step: Step, n: int = 1) -> list[Outcome]:
    def run(program: StepProgram) -> Outcome:
        program.start()
        return outcome_of(program)

    with step_programs([(step, net())], BATCH, ("0.weight", "0.bias")) as (program,):
        return [run(program) for _ in range(n)]


def test_each_run_starts_from_the_first_state() -> None:
    first, again = outcomes(sgd, 2)
    assert first.gradients["0.weight"] is not None and first.stepped
    for one, other in ((first.gradients, again.gradients), (first.parameters, again.parameters)):
        assert set(one) == set(other) == {"0.weight", "0.bias"}
        for name, value in one.items():
            assert value is not None and torch.equal(value, other[name])


def test_gradients_are_read_before_the_optimizer_clears_them() -> None:
    (with_optimizer,), (bare,) = outcomes(sgd), outcomes(squares)
    assert not bare.stepped and bare.loss and with_optimizer.loss is None
    for name, gradient in bare.gradients.items():
        assert gradient is not None and torch.equal(gradient, with_optimizer.gradients[name])


def test_a_step_in_float64_casts_model_and_batch() -> None:
    types: list[torch.dtype] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        types.append(batch.dtype)
        return squares(model, batch)

    with step_programs([(step, net())], BATCH, ("0.weight",)) as (program,):
        exact = program.in_float64()
        exact.start()
        gradient = outcome_of(exact).gradients["0.weight"]
    assert types == [torch.float64] * 2 and gradient is not None and gradient.dtype == torch.float64


def test_a_parameter_that_moves_inside_backward_is_listed_where_no_gradient_is_left() -> None:
    def step(model: nn.Module, batch: Any) -> None:
        squares(model, batch)
        model[0].weight.data.sub_(model[0].weight.grad)
        model.zero_grad(set_to_none=True)

    assert set(outcomes(step)[0].moved) == {"0.weight"}


def test_a_tensor_that_no_rank_shares_is_whole() -> None:
    value = nn.Parameter(torch.ones(2))
    assert whole(value) is value


def judged(reference: Step, candidate: Step, model: nn.Module | None = None) -> Comparison:
    model = model or net()
    run = Measurement(spec=RunSpec(model=ModelRef(target="test.py")), environment=WHERE)
    with step_programs([(reference, model), (candidate, model)], BATCH, ("0.weight", "0.bias")) as programs:
        return judge_programs(Comparison(baseline=run, candidate=run), *programs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_is_watched_where_hooks_run_and_not_in_compiled_code(compiled: bool) -> None:
    model: Any = net()
    if compiled:
        model[0].compile(backend="eager")
    forward = judged(squares, doubled, model).forward
    assert forward is None if compiled else forward and forward.same and forward.order == ("", "0", "1")
