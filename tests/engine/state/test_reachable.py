"""What objects hold, what a walk reaches, and which names and files belong to a model."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from explorer.engine.state.reachable import (
    closure,
    data_inside,
    is_of_author,
    is_own_function,
    is_own_module,
    names_in,
    picture,
    reachable,
    reachable_generators,
    referenced_names,
)
from explorer.engine.state.rng import generators_of
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
    before = plain_copy(generator)
    assert same_state(before, plain_copy(generator))
    draw(generator)
    assert not same_state(before, plain_copy(generator))


def test_a_function_carries_cells_defaults_and_attributes() -> None:
    count = [1]

    def counts(step: int = 2, *, other: int = 3) -> None:
        count.append(step + other)

    counts.n = 4
    name, cells, defaults, attributes = closure(counts)
    assert name.endswith("counts") and cells == [[1]] and cells[0] is count
    assert defaults == [[2], {"other": 3}] and attributes == {"n": 4}
    assert closure(functools.partial(counts, 1, other=2)) == (counts, [1], {"other": 2})
    thing = [1]
    assert closure(classmethod(counts)) == (counts,) and closure(thing) is None


def test_a_method_carries_what_it_is_bound_to_and_an_empty_cell_nothing() -> None:
    class Holds:
        def method(self) -> Holds:
            return self

    holder = Holds()
    assert closure(holder.method) == (Holds.method, holder)

    def later() -> int:
        return value

    assert closure(later)[1] == [None]
    value = 1


def test_functions_and_modules_of_libraries_are_not_own() -> None:
    assert is_own_function(test_a_function_carries_cells_defaults_and_attributes) and not is_own_function(len)
    assert not is_own_function(torch.nn.functional.linear) and not is_own_function(pytest.raises)
    assert closure(pytest.raises) == ("raises",)
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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "spoken_helpers.py").write_text("N_CALLS = 0\nDATA = [1]\ndef bump():\n    global N_CALLS\n")
    (tmp_path / "spoken_model.py").write_text(
        "import os\nimport torch\nimport spoken_helpers\nOWN = 1\nUNUSED = 2\n"
        "def forward():\n"
        "    def inner():\n        return OWN\n"
        "    spoken_helpers.bump()\n    spoken_helpers.N_CALLS += 1\n    return inner, os.sep, torch.ones\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import spoken_model

    yield spoken_model
    for name in ("spoken_model", "spoken_helpers"):
        del sys.modules[name]


def test_only_names_that_the_code_uses_are_referenced(files: ModuleType) -> None:
    names = {(file["__name__"], name) for file, name in referenced_names(files.forward)}
    own = {("spoken_model", name) for name in ("OWN", "spoken_helpers", "os", "torch")}
    assert names == own | {("spoken_helpers", "bump"), ("spoken_helpers", "N_CALLS")}


def test_functions_within_are_read_too(files: ModuleType) -> None:
    assert {"OWN", "sep", "N_CALLS"} <= set(names_in(files.forward.__code__))


def test_installed_packages_have_another_author(files: ModuleType) -> None:
    assert is_of_author(files) and is_of_author(files.forward)
    assert not any(map(is_of_author, (sys, torch, pytest, torch.nn.Linear, pytest.raises, names_in)))


def test_generators_inside_lists_and_objects_but_not_those_of_the_process() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"deep": random.Random(2)}
            self.me = self

    net = nn.Linear(1, 1)
    net.own, net.listed, net.held = torch.Generator(), [random.Random(1)], Holder()  # type: ignore[assignment]
    net.shared, net.system = random._inst, random.SystemRandom()  # type: ignore[assignment, attr-defined]
    assert generators_of(net) == {"own": net.own}
    assert reachable_generators(net) == [net.own, net.listed[0], net.held.inner["deep"]]  # type: ignore[index, union-attr]


def test_a_walk_meets_each_object_once_and_ends() -> None:
    ring: list[Any] = [[1], (two := {"deep": [2]}), two, "text", 3]
    ring.append(ring)
    assert reachable([ring], lambda value: value if isinstance(value, list) else ()) == [ring, [1], two]
    assert data_inside([ring]) == [ring, [1], two, [2]]


def test_a_picture_differs_once_an_object_inside_is_another_or_is_written_to() -> None:
    class Cache:
        __slots__ = ("keys",)

        def __init__(self) -> None:
            self.keys = torch.zeros(2)

    cache, features = Cache(), [torch.zeros(2)]
    before = picture([cache, features])
    features[0].add_(1)
    assert picture([cache, features]) == before, "a tensor of a list counts by identity alone"
    assert picture(features, versions=True) != picture([torch.zeros(2)], versions=True)
    cache.keys.add_(1)
    assert picture([cache, features]) != before
    assert picture([cache], objects=False) == picture([cache], objects=False)
    features.append(features[0])
    assert picture(features) != picture(features[:1])
