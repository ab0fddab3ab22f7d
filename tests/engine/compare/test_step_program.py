"""A program's steps begin at the state that was found, and their gradients are those that an optimizer finds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.compare.step_program import StepProgram, take_steps, whole
from explorer.engine.state.snapshot import ModelSnapshot

BATCH = torch.linspace(-1, 1, 6).reshape(2, 3)


def squares(model: nn.Module, batch: Any) -> Tensor:
    loss = model(batch).square().sum()
    loss.backward()
    return loss


class Sgd:
    """A step with torch's own optimizer, made anew each time; it zeroes nothing before its end."""

    def __call__(self, model: nn.Module, batch: Any) -> None:
        squares(model, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


def program_of(step: Any, **options: Any) -> StepProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    names = tuple(name for name, _ in model.named_parameters())
    found_model = ModelSnapshot(model, list(model.modules()))
    return StepProgram(step, model, BATCH, names, found=[found_model], **options)


def test_each_run_begins_at_what_was_found() -> None:
    program = program_of(Sgd())
    first, again = take_steps(program), take_steps(program)
    assert first.gradients["0.weight"] is not None and first.stepped
    for one, other in ((first.gradients, again.gradients), (first.parameters, again.parameters)):
        assert set(one) == set(other) == set(program.parameters)
        for name, value in one.items():
            assert value is not None and torch.equal(value, other[name])


def test_gradients_are_taken_before_the_optimizer_forgets_them() -> None:
    with_optimizer, bare = take_steps(program_of(Sgd())), take_steps(program_of(squares))
    assert not bare.stepped and bare.loss > 0 and math.isnan(with_optimizer.loss)
    for name, gradient in bare.gradients.items():
        assert gradient is not None and torch.equal(gradient, with_optimizer.gradients[name])


def test_a_step_in_float64_casts_model_and_batch() -> None:
    seen: list[torch.dtype] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch.dtype)
        return squares(model, batch)

    outcome = take_steps(program_of(step, dtype=torch.float64))
    assert seen == [torch.float64] * 2 and {g.dtype for g in outcome.gradients.values() if g is not None} == {
        torch.float64
    }


def test_a_parameter_that_moves_inside_backward_is_told_where_no_gradient_is_left() -> None:
    def step(model: nn.Module, batch: Any) -> None:
        squares(model, batch)
        model[0].weight.data.sub_(model[0].weight.grad)
        model.zero_grad(set_to_none=True)

    assert set(take_steps(program_of(step)).moved) == {"0.weight"}


def test_a_tensor_that_no_rank_shares_is_whole() -> None:
    assert whole(None) is None
    value = nn.Parameter(torch.ones(2))
    assert torch.equal(whole(value), value) and not whole(value).requires_grad
