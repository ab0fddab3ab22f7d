"""What objects hold, which names and files belong to a model, and copies of all that, which are compared."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.state.reachable import (
    closure,
    data_inside,
    instances_in_memory,
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
from explorer.engine.state.state_diff import BEYOND, plain_copy, read_state, same_state, short_text


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

    assert closure(later)[1] == []
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


class InSlots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = [1]


def test_reading_touches_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    read_state(model, whole=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


HELD: dict[str, tuple[Any, Any]] = {
    "deque": (deque([1]), lambda held: held.append(2)),
    "array": (numpy.zeros(2), lambda held: held.__setitem__(0, 1)),
    "slots": (InSlots(), lambda held: held.n.append(2)),
    "tensor": (torch.zeros(2), lambda held: held.add_(1)),
    "gradient": (torch.zeros(2, requires_grad=True), lambda held: setattr(held, "grad", torch.ones(2))),
    "module": (nn.Linear(1, 1), lambda held: held.weight.data.add_(1)),
    "generator": (torch.Generator(), lambda held: held.manual_seed(5)),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_later_change_does_not_reach_the_picture(kind: str) -> None:
    held, change = HELD[kind]
    before, again = plain_copy(held), plain_copy(held)
    change(held)
    assert same_state(before, again) and not same_state(before, plain_copy(held))


def test_hooks_and_modes_are_read_where_asked_for() -> None:
    model = nn.Linear(1, 1)
    plain, whole = read_state(model), read_state(model, whole=True)
    assert ("", "mode", "attribute") not in plain
    model.eval()
    model.register_forward_hook(lambda *_: None)
    after = read_state(model, whole=True)
    changed = {key[1] for key in whole if not same_state(whole[key], after.get(key))}
    assert {"mode", "hooks"} <= changed


def test_what_torch_has_freed_is_not_read() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    assert plain_copy(tensor) == "freed (3,)" and plain_copy(torch.ones(2, device="meta")) == "meta (2,)"


def test_what_stands_behind_many_objects_is_reached_and_what_is_left_out_is_marked() -> None:
    image = plain_copy({"memory": [[i] for i in range(100_001)], "numbers": list(range(100_001)), "behind": [[1]]})
    assert image["memory"][1] == BEYOND and image["numbers"][-1] == 100_000 and image["behind"] == [1, [1, 1]]


def test_the_address_of_an_iterator_is_no_state() -> None:
    assert same_state(plain_copy(itertools.cycle([0])), plain_copy(itertools.cycle([0])))
    assert not same_state(plain_copy(itertools.count(0)), plain_copy(itertools.count(1)))


def test_an_iterator_with_attributes_is_an_object() -> None:
    class Schedule:
        step = 0

        def __iter__(self) -> Schedule:
            return self

        def __next__(self) -> int:
            self.step += 1
            return self.step

    schedule = Schedule()
    next(schedule)
    before = plain_copy(schedule)
    next(schedule)
    assert not same_state(before, plain_copy(schedule))


def test_a_structure_that_holds_itself_ends() -> None:
    ring: list[Any] = []
    ring.append({"itself": ring})
    assert same_state(plain_copy(ring), plain_copy(ring))


@pytest.mark.parametrize(("value", "short_form"), [
    (3, "3"), (0.5, "0.5"), (None, "absent"), ([1, 2], "2 items"), ({"a": 1}, "1 items"),
    ("x" * 99, "'" + "x" * 38 + "…"), (torch.tensor(7), "7"), (torch.tensor(0.25), "0.25"), (math.nan, "nan"),
    (torch.zeros(2, 3), "0, 0, 0, … (2 x 3)"),
])  # fmt: skip
def test_short_form(value: Any, short_form: str) -> None:
    kept: Tensor | Any = plain_copy(value)
    assert short_text(kept) == short_form


class _Scaled(Tensor):
    """A subclass of a user's own."""


class _Slow(torch.optim.SGD):
    """An optimizer of a user's own."""


def test_every_instance_in_memory_is_found_as_a_list_of_all_objects_has_it() -> None:
    weight = nn.Parameter(torch.zeros(2))
    kept = [
        weight,
        torch.zeros(1),
        torch.zeros(3).as_subclass(_Scaled),
        _Slow([weight], lr=0.1),
        nn.Linear(1, 1).weight,
    ]
    found = {id(thing) for thing in instances_in_memory(Tensor, torch.optim.Optimizer)}
    listed = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), (Tensor, torch.optim.Optimizer))}
    assert found == listed >= {id(thing) for thing in kept}
