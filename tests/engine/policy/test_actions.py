"""Operators go by the names that a policy writes, and what stands around a recompute is entered at every one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from explorer.engine.policy.actions import known_operators, operator, operators, selective_contexts


def test_an_operator_by_its_full_name() -> None:
    assert operators(["aten.mm.default"]) == (torch.ops.aten.mm.default,)
    for unknown in ("aten.mm", "aten.no_such.default", "aten.mm.no_such"):
        with pytest.raises(AttributeError):
            operator(unknown)


def test_every_operator_that_is_offered_can_be_asked_for() -> None:
    names = [name for name in known_operators() if name.startswith("aten.")]
    assert len(names) > 1000 and "aten.mm.default" in names
    assert all(str(operator(name)) == name for name in names[::50])


@pytest.mark.parametrize("save_ops", [(), (torch.ops.aten.mm.default,)])
def test_each_recompute_is_surrounded_and_saved_results_come_back(save_ops: tuple[object, ...]) -> None:
    entered: list[str] = []

    @contextmanager
    def again() -> Iterator[None]:
        entered.append("in")
        try:
            yield
        finally:  # early stop leaves by an exception
            entered.append("out")

    weight = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_()
    x = torch.ones(2, 3)
    expected = torch.autograd.grad((x @ weight).tanh().sin().sum(), weight)[0]
    result = checkpoint(
        lambda: (x @ weight).tanh().sin(), use_reentrant=False, context_fn=lambda: selective_contexts(save_ops, again)
    )
    assert torch.equal(torch.autograd.grad(result.sum(), weight)[0], expected)
    assert entered == ["in", "out"]
