"""What differing tensors have in common becomes one sentence, and nothing is said that was not computed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from explorer.plan.why.gradients import patterns
from explorer.record.comparison import ForwardDiff
from tests.record.test_comparison import compared, gradient

FORWARD = ForwardDiff(n_calls=(1, 1), n_compared=4, order=("", "a", "b", "c"), same=True)


def told(wrong: str, *, forward: ForwardDiff | None = FORWARD, **more: Any) -> str:
    gradients = [gradient(f"{block}.w", bitwise=block not in wrong) for block in "abc"]
    return " ".join(patterns(compared(*gradients, forward=forward, **more)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("ab", "backward is the same down to c.w, and 2 of the 2 gradients before it differ, b.w first"),
        ("a", "the gradient of a.w alone differs"),
        ("abc", "3 of 3 gradients differ, that of the last block among them"),
        ("", ""),
    ],
)
def test_equal_forwards_leave_backward(wrong: str, says: str) -> None:
    assert says in told(wrong) and bool(told(wrong)) == bool(wrong)


def test_a_loss_that_is_not_known_to_be_equal_stays_among_the_causes() -> None:
    assert "shifted targets" in told("ab") and "shifted targets" not in told("ab", loss_equal=True)
    assert told("ab", loss_equal=False).startswith("The model returns the same and the loss is another.")


def test_forward_that_differs_by_rounding_alone_is_not_called_the_same() -> None:
    assert told("ab", forward=replace(FORWARD, same=False)) == ""
    assert told("ab", forward=None) == ""


def test_a_step_after_the_first_is_told_apart() -> None:
    later = (gradient("a.w", bitwise=False),)
    assert told("", later_gradients=later).startswith("The gradients of the first step are the same and those of a")
    assert "first step" not in told("a", later_gradients=later)
