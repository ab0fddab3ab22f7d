"""Each backward of somebody's loop is announced once, one inside another not, and torch's own is back afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from explorer.engine.watch.backward import around_backward


def test_each_backward_is_told_from_both_sides() -> None:
    plain = torch.autograd.backward
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with around_backward(lambda: told.append("begins"), lambda: told.append("ended")):
        (x * 2).sum().backward()
        torch.autograd.backward([(x * 3).sum()])
    (x * 2).sum().backward()
    assert told == ["begins", "ended"] * 2 and torch.autograd.backward is plain


def test_what_reentrant_checkpointing_calls_from_within_is_none() -> None:
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with around_backward(lambda: told.append("begins"), lambda: told.append("ended")):
        checkpoint(torch.tanh, x, use_reentrant=True).sum().backward()
    assert told == ["begins", "ended"]


def test_one_that_raises_has_ended_too() -> None:
    plain = torch.autograd.backward
    told: list[str] = []
    with (
        pytest.raises(RuntimeError, match="does not require grad"),
        around_backward(lambda: told.append("begins"), lambda: told.append("ended")),
    ):
        torch.ones(()).backward()
    assert told == ["begins", "ended"] and torch.autograd.backward is plain
