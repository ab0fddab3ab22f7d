"""Whoever looks at what autograd saves keeps nothing alive by it, and is seen by nobody."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.watch.saved import let_go, looking_at_saved

SAVES_ITS_OUTPUT: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.exp, torch.tanh, torch.sigmoid, torch.relu, lambda x: x.softmax(-1),
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("operation", SAVES_ITS_OUTPUT)
def test_an_output_that_its_own_operation_saves_is_gone_when_nobody_has_it(
    operation: Callable[[Tensor], Tensor],
) -> None:
    given, seen = torch.ones(3, requires_grad=True), []
    with looking_at_saved(lambda tensor: seen.append(tensor.shape)):
        made = operation(given)
    assert seen
    gone = weakref.ref(made)
    del made
    assert gone() is None


def test_gradients_are_those_of_nobody_looking() -> None:
    given = torch.randn(3, requires_grad=True)
    with looking_at_saved(lambda tensor: None):
        watched = (given.exp() * given).softmax(-1).square().sum()
    plain = (given.exp() * given).softmax(-1).square().sum()
    assert torch.equal(*(torch.autograd.grad(loss, given)[0] for loss in (watched, plain)))


def test_no_mode_sees_it_and_a_leaf_stays_itself() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    given = torch.ones(3, requires_grad=True)
    with Names() as names, looking_at_saved(lambda tensor: None):
        (given.exp() * given).sum()
    assert names.seen == ["aten.exp.default", "aten.mul.Tensor", "aten.sum.default"]
    assert let_go(given) is given
