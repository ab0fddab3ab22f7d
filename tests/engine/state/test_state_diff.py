"""Copies of a model's state: no later change reaches them, and two of them are compared bit by bit."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.state.state_diff import BEYOND, plain_copy, read_state, same_state, short_text


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


def test_a_class_of_the_models_own_is_remembered_by_its_name() -> None:
    class Counts(nn.Module):
        n_calls = 0

    (key,) = [key for key in read_state(nn.Sequential(Counts())) if key[1].endswith("Counts.n_calls")]
    assert key[0] == "" and key[2] == "attribute"


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
