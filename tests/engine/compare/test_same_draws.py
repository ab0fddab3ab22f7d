"""A run in float64 draws the numbers that the run in the model's own type draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from explorer.engine.compare.same_draws import SameDraws
from tests.engine.judging import judged


def test_a_model_that_samples_in_its_own_type_has_a_reference() -> None:
    """torch.rand_like draws other numbers in float64; the reference draws the baseline's."""
    comparison = judged("noise_in_own_type", ("1", "2"))
    assert (comparison.verdict, comparison.reference) == ("bitwise equal", "float64")
    sampled = judged("sampled_lstm", ("lstm",), use_reentrant=True)
    assert (sampled.verdict, sampled.reference) == ("rounding", "float64")
    assert any(not diff.bitwise for diff in sampled.gradients)
    assert sampled.causes == (
        "Reentrant checkpointing runs forward without gradients, where torch may choose other kernels.",
    )


DRAWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rand_like": lambda dtype: torch.rand_like(torch.zeros(5, dtype=dtype)),
    "randn": lambda dtype: torch.randn(5, dtype=dtype),
    "in place": lambda dtype: torch.zeros(5, dtype=dtype).uniform_(2.0, 3.0),
    "of a float": lambda dtype: torch.bernoulli(torch.full((5,), 0.5, dtype=dtype)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_float64_is_the_narrow_one_widened(name: str) -> None:
    torch.manual_seed(3)
    narrow = DRAWS[name](torch.float32)
    torch.manual_seed(3)
    with SameDraws(torch.float32):
        wide = DRAWS[name](torch.float64)
    assert wide.dtype == torch.float64 and torch.equal(wide, narrow.double())


def test_what_draws_nothing_stays_in_float64() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with SameDraws(torch.float32):
        assert torch.equal(x * x, torch.full((3,), (1 / 3) ** 2, dtype=torch.float64))
