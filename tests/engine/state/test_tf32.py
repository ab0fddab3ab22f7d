"""Judged without TensorFloat-32, and everything that a model may read about it stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from explorer.engine.state.global_state import tf32_kinds, without_tf32

CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_torch_starts() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True


def test_convolutions_may_use_it_by_default_and_products_may_not() -> None:
    assert tf32_kinds() == ("convolutions", "recurrent layers")


@pytest.mark.parametrize("matmul", ["highest", "high"])
@pytest.mark.parametrize("cudnn", [True, False])
def test_it_is_off_inside_and_as_it_was_afterwards(*, cudnn: bool, matmul: str) -> None:
    CUDNN.allow_tf32 = cudnn
    torch.set_float32_matmul_precision(matmul)
    before = tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32
    with pytest.raises(ValueError, match="in the step"), without_tf32():
        assert (tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32) == ((), False, False)
        raise ValueError("in the step")
    assert (tf32_kinds(), CUDNN.allow_tf32, MATMUL.allow_tf32) == before


def test_a_choice_by_kind_survives() -> None:
    """torch refuses to read its old switch then."""
    CUDNN.allow_tf32 = False
    CUDNN.conv.fp32_precision = "tf32"
    with without_tf32():
        assert tf32_kinds() == ()
    assert tf32_kinds() == ("convolutions",)
