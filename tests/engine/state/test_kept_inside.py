"""What functions carry along and where generators stand, though no attribute shows it."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy
import pytest
import torch

from explorer.engine.state.closures import captured, is_own_function, is_own_module, state_of_itself
from explorer.engine.state.snapshot import StepSnapshot
from explorer.engine.state.state_diff import plain_copy, same_state


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda one: torch.rand(1, generator=one)),
        (random.Random(1), lambda one: one.random()),
        (numpy.random.RandomState(1), lambda one: one.rand()),
        (numpy.random.default_rng(1), lambda one: one.random()),
        (numpy.random.PCG64(1), lambda one: one.random_raw()),
    ],
    ids=["torch", "python", "numpy's old", "numpy", "its bits"],
)
def test_a_generator_stands_elsewhere_after_a_draw(generator: Any, draw: Any) -> None:
    before = plain_copy(state_of_itself(generator))
    assert before is not None and same_state(before, plain_copy(state_of_itself(generator)))
    draw(generator)
    assert not same_state(before, plain_copy(state_of_itself(generator)))


def test_what_is_no_generator_stands_nowhere() -> None:
    assert state_of_itself([1]) is None and state_of_itself(numpy.zeros(1)) is None


def test_a_function_carries_cells_defaults_and_attributes() -> None:
    count = [1]

    def counts(step: int = 2, *, other: int = 3) -> None:
        count.append(step + other)

    counts.n = 4
    name, cells, defaults, attributes = captured(counts)
    assert name.endswith("counts") and cells == [[1]] and cells[0] is count
    assert defaults == [[2], {"other": 3}] and attributes == {"n": 4}
    assert captured(functools.partial(counts, 1, other=2)) == (counts, [1], {"other": 2})
    thing = [1]
    assert captured(classmethod(counts)) == (counts,) and captured(thing) is None


def test_a_method_carries_what_it_is_bound_to_and_an_empty_cell_nothing() -> None:
    class Holds:
        def method(self) -> Holds:
            return self

    holder = Holds()
    assert captured(holder.method) == (Holds.method, holder)

    def later() -> int:
        return value

    assert captured(later)[1] == [None]
    value = 1


def test_functions_and_modules_of_libraries_are_nobodys_own() -> None:
    assert is_own_function(test_what_is_no_generator_stands_nowhere) and not is_own_function(len)
    assert not is_own_function(torch.nn.functional.linear) and not is_own_function(pytest.raises)
    assert captured(pytest.raises) == ("raises",)
    assert is_own_module("__main__") and is_own_module("my_model.layers")
    assert not is_own_module("torch.nn") and not is_own_module(json.__name__) and not is_own_module("numpy")


class Lazy:
    """What stands for a package that is not installed, as monai's does: every attribute raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: the package is not installed")


LAZY = Lazy()


class Naming(torch.nn.Module):
    package = LAZY

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(LAZY, Lazy) else LAZY.read(x)


def test_a_thing_whose_attributes_raise_is_walked() -> None:
    assert not is_own_function(LAZY)
    model = Naming()
    model.reader = LAZY  # type: ignore[assignment]
    for thing in (LAZY, model, Naming.forward):
        assert same_state(plain_copy(thing), plain_copy(thing))
    StepSnapshot(model, lambda: model(torch.ones(1))).restore()
    assert model.reader is LAZY
