"""A watched backward adds gradients up where an unwatched one does: in place only where nobody else holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.watch.in_place import ADD, references_of_the_last_holder, sum_of_gradients


class Sums(TorchDispatchMode):
    """Adds gradients as the tracker does, and notes which sums took no storage of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and not torch.is_grad_enabled():
            total = sum_of_gradients(args, kwargs or {})
            self.in_place.append(total is not None)
            if total is not None:
                return total
        return func(*args, **(kwargs or {}))


def test_this_torch_can_tell_the_last_holder() -> None:
    assert references_of_the_last_holder() is not None


def test_a_value_used_three_times_is_summed_in_place_to_the_same_bits() -> None:
    def backward(x: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_()
        (x @ weight @ weight @ weight).square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = backward(x)
    with Sums() as sums:
        assert torch.equal(backward(x), expected)
    assert sums.in_place == [True, True]


@pytest.mark.parametrize("kept", [True, False])
def test_a_gradient_that_a_hook_keeps_is_not_written(kept: bool) -> None:
    held: list[torch.Tensor] = []
    weight = torch.ones(3, requires_grad=True)
    parts = [weight * 2, weight * 3]
    if kept:
        for part in parts:
            part.grad_fn.register_hook(lambda given, _: held.append(given[0]))
    with Sums() as sums:
        sum(part.sum() for part in parts).backward()
    assert sums.in_place == [not kept] and weight.grad.tolist() == [5.0] * 3
    assert sorted(one.tolist() for one in held) == ([[2.0] * 3, [3.0] * 3] if kept else [])


def test_what_differs_in_shape_or_type_is_added_as_asked() -> None:
    with torch.no_grad():
        assert sum_of_gradients((torch.ones(2), torch.ones(1)), {}) is None
        assert sum_of_gradients((torch.ones(2), torch.ones(2).double()), {}) is None
        assert sum_of_gradients((torch.ones(2), 1.0), {}) is None
    assert sum_of_gradients((torch.ones(2), torch.ones(2)), {}) is None  # a forward's sum
