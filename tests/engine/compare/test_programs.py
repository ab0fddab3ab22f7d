"""Two programs start from one state and are judged by rounding, against the step in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from explorer.engine.compare import judgement, outcome
from explorer.engine.compare.carried import parameter_differences, state_differences
from explorer.engine.compare.diffs import epsilon_of
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.outcome import (
    Branches,
    SameBranches,
    SameDraws,
    Yardsticks,
    most_common_type,
    outcome_of,
    reference,
)
from explorer.engine.compare.programs import Outcome
from explorer.engine.compare.spec_program import SpecProgram, formats_of
from explorer.engine.compare.step_program import Step, StepProgram, step_programs
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import preserve_global_state
from explorer.record.comparison import BufferDiff, Comparison
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec
from tests.engine.judging import WHERE
from tests.engine.tiny_nets import ref
from tests.view.builders import equal_gradient, wrong_gradient

BATCH = torch.linspace(-1, 1, 6).reshape(2, 3)


def squares(model: nn.Module, batch: Any) -> Tensor:
    loss = model(batch).square().sum()
    loss.backward()
    return loss


def doubled(model: nn.Module, batch: Any) -> None:
    (2 * model(batch).square().sum()).backward()


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


def test_each_run_starts_from_the_first_state_and_gradients_are_read_before_the_optimizer_clears_them() -> None:
    (first, again), (bare,) = outcomes(sgd, 2), outcomes(squares)
    assert first.stepped and first.loss is None and bare.loss and not bare.stepped
    pairs = (
        (first.gradients, again.gradients),
        (first.parameters, again.parameters),
        (bare.gradients, first.gradients),
    )
    for one, other in pairs:
        assert set(one) == set(other) == {"0.weight", "0.bias"}
        for name, value in one.items():
            assert value is not None and torch.equal(value, other[name])


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


def judged_steps(reference: Step, candidate: Step, model: nn.Module | None = None) -> Comparison:
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
    forward = judged_steps(squares, doubled, model).forward
    assert forward is None if compiled else forward and forward.same and forward.order == ("", "0", "1")


def test_random_numbers_have_the_type_of_most_gradients_and_rounding_the_coarsest() -> None:
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert most_common_type({"a": half, "b": full, "c": half, "d": None}) == torch.bfloat16
    assert most_common_type({"a": None}) == torch.get_default_dtype()
    assert epsilon_of({"a": full}, set()) == torch.finfo(torch.float32).eps
    assert epsilon_of({"a": full, "b": half}, set()) == torch.finfo(torch.bfloat16).eps
    assert epsilon_of({"a": full}, {torch.float16}) == torch.finfo(torch.float16).eps
    spec = RunSpec(model=ModelRef(target="a.py"), autocast="bfloat16")
    assert epsilon_of({"a": full}, formats_of(spec)) == torch.finfo(torch.bfloat16).eps


def referred(factory: str) -> tuple[Outcome | None, str]:
    spec = RunSpec(model=ref(factory), optimizer="none")
    program = SpecProgram(spec, load_for(spec))
    with preserve_global_state():
        program.start()
        return reference(program, outcome_of(program))


def test_decisions_within_rounding_leave_a_reference_and_amplified_rounding_leaves_none() -> None:
    exact, because = referred("borderline")
    assert exact is not None and because == ""
    exact, because = referred("amplifying")
    assert exact is None and "no generator moved" in because and "amplifies it" in because


def decided(x: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """A result and its gradient by `x`."""
    x = x.clone().requires_grad_()
    passed = (x * 1).relu_() if in_place else x.relu()
    y = F.max_pool2d(passed, 2)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("in_place", [False, True])
def test_another_input_is_decided_as_the_first_was(in_place: bool) -> None:
    first = torch.tensor([[[[1.0, 0.0], [-1.0, 1.0 - 1e-7]]]])
    other = torch.tensor([[[[1.0 - 1e-7, 1e-9], [-1.0, 1.0]]]])
    with Branches() as branches:
        y, gradient = decided(first, in_place=in_place)
    assert gradient.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert decided(other, in_place=in_place)[1].flatten().tolist() == [0.0, 0.0, 0.0, 1.0]
    with SameBranches(branches.decisions):
        alike, same_gradient = decided(other, in_place=in_place)
    assert torch.equal(same_gradient, gradient) and torch.allclose(alike, y, atol=1e-6)
    with pytest.raises(IndexError), SameBranches(branches.decisions):
        decided(other, in_place=in_place)


DRAWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rand_like": lambda dtype: torch.rand_like(torch.zeros(5, dtype=dtype)),
    "randn": lambda dtype: torch.randn(5, dtype=dtype),
    "in place": lambda dtype: torch.zeros(5, dtype=dtype).uniform_(2.0, 3.0),
    "of a float": lambda dtype: torch.bernoulli(torch.full((5,), 0.5, dtype=dtype)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_float64_is_the_narrow_one_widened_and_products_stay_exact(name: str) -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.manual_seed(3)
    narrow = DRAWS[name](torch.float32)
    torch.manual_seed(3)
    with SameDraws(torch.float32):
        wide, product = DRAWS[name](torch.float64), x * x
    assert wide.dtype == torch.float64 and torch.equal(wide, narrow.double())
    assert torch.equal(product, torch.full((3,), (1 / 3) ** 2, dtype=torch.float64))


@pytest.mark.parametrize(("finer_than", "dtype", "relative", "rounds"), [
    (2**-7, "float32", 9.9 * 2**-23, True),
    (2**-7, "float32", 10.1 * 2**-23, False),
    (2**-7, "float16", 9.9 * 2**-10, True),
    (2**-7, "float16", 10.1 * 2**-10, False),
    (2**-7, "bfloat16", 1.0, True),
    (2**-23, "float32", 1.0, True),
    (None, "float32", 1.0, True),
])  # fmt: skip
def test_with_equal_gradients_state_of_a_finer_type_than_the_run_rounds_by_its_own_epsilon(
    finer_than: float | None, dtype: str, relative: float, *, rounds: bool
) -> None:
    diff = BufferDiff(
        name="b", shape=(1,), dtype=dtype, presence="both", bitwise=False, relative_norm=relative,
        baseline_error=1.0, candidate_error=1.0,
    )  # fmt: skip
    (judged,) = judgement._with_reasons((), finer_than, (diff,))
    assert judged.verdict == ("rounding" if rounds else "different") and bool(judged.never_rounds) is not rounds
    (moved,) = judgement._with_reasons(("b",), finer_than, (diff,))
    assert (moved.verdict, moved.never_rounds) == ("different", "A recompute moved it a second time.")


@pytest.mark.parametrize(("off", "is_reference"), [(0.99e-3, True), (1.01e-3, False)])
def test_half_of_the_digits_must_agree_with_float64(off: float, *, is_reference: bool) -> None:
    ones = torch.ones(4, dtype=torch.float64)
    because = outcome._too_far(Outcome(gradients={"w": ones}), Outcome(gradients={"w": ones * (1 + off)}), 1e-6)
    assert (because == "") is is_reference


GRADIENTS = (
    equal_gradient("equal"),
    *(replace(equal_gradient(name), bitwise=False, relative_norm=1e-7) for name in ("rounded", "moved")),
    wrong_gradient("far"),
)


@pytest.mark.parametrize(("stepped", "explained"), [
    (True, set()), (False, {"rounded"}), (None, {"equal", "rounded", "no gradient"}),
])  # fmt: skip
def test_rounded_gradients_explain_a_parameter_that_no_optimizer_of_torch_stepped(
    stepped: bool | None, explained: set[str]
) -> None:
    names = ("equal", "rounded", "moved", "far", "no gradient", "frozen")
    sides = [Outcome(after=[dict.fromkeys(names, torch.full((2,), value))], stepped=stepped) for value in (1.0, 2.0)]
    sides[0].trained = frozenset(names) - {"frozen"}
    sides[0].moved = {"moved": torch.ones(2)}
    diffs = parameter_differences(sides[0], sides[1], Yardsticks(1e-7, None, None), GRADIENTS)
    assert {diff.name for diff in diffs if diff.gradients_round} == explained
    assert {diff.name for diff in diffs if diff.trained} == sides[0].trained


@pytest.mark.parametrize(("led", "by_the_step"), [(False, {"equal"}), (True, {"equal", "rounded", "far"})])
def test_a_step_of_equal_gradients_may_be_off_in_length(*, led: bool, by_the_step: set[str]) -> None:
    """Every parameter makes a step that is longer by less than 512 roundings, which only such a step may."""
    names = ("equal", "rounded", "moved", "far")
    start, exact, longer = (dict.fromkeys(names, torch.full((2,), n, dtype=torch.float64)) for n in (1, 2, 2 + 5e-5))
    baseline = Outcome(after=[start, exact], trained=frozenset(names), moved={"moved": exact["moved"]}, stepped=True)
    yardsticks = Yardsticks(1e-7, None, Outcome(after=[exact]))
    diffs = parameter_differences(baseline, Outcome(after=[longer], led=led), yardsticks, GRADIENTS)
    assert {diff.name for diff in diffs if (diff.candidate_error or 0.0) < 1e-9} == by_the_step


@pytest.mark.parametrize(("steps", "led"), [
    ((sgd, sgd), True), ((sgd, squares), False), ((squares, sgd), False), ((squares, squares), False),
])  # fmt: skip
def test_a_run_is_led_where_optimizers_of_torch_step_in_both(steps: tuple[Step, Step], *, led: bool) -> None:
    with step_programs([(step, net()) for step in steps], BATCH, ("0.weight", "0.bias")) as programs:
        for program in programs:
            program.start()
        lead = outcome_of(programs[0])
        assert not lead.led and outcome_of(programs[1], lead=lead).led is led


def test_buffers_of_the_first_step_are_no_state_that_moved() -> None:
    """They are compared for themselves; after the last step all state is."""
    states = [
        {("0", kind, kind): torch.tensor([value]) for kind in ("buffer", "attribute")} for value in (1.0, 2.0)
    ]  # fmt: skip
    sides = [Outcome(states=[state, state]) for state in states]  # type: ignore[list-item]
    diffs = state_differences(sides[0], sides[1], Yardsticks(1e-7, None, None), ())
    assert [(diff.kind, diff.step) for diff in diffs] == [("attribute", 1), ("buffer", 2), ("attribute", 2)]
    diffs = state_differences(sides[0], sides[1], Yardsticks(1e-7, None, None), [("0", "attribute", "attribute")])
    assert [(diff.kind, diff.step) for diff in diffs] == [("buffer", 2)]
