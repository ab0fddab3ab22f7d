"""Deterministic kernels inside, the process's own settings outside."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.backends import cudnn
from torch.utils import deterministic

from explorer.engine.state.global_state import deterministic_kernels


def settings() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        cudnn.benchmark,
    )


@pytest.mark.parametrize("raising", [False, True])
def test_settings_come_back(raising: bool) -> None:
    before = settings()
    cudnn.benchmark = True
    try:
        with deterministic_kernels():
            assert settings() == (True, True, False, False)
            if raising:
                raise ValueError("inside")
    except ValueError:
        assert raising
    assert cudnn.benchmark
    cudnn.benchmark = before[3]
    assert settings() == before


def test_an_operator_without_a_deterministic_kernel_runs_without_a_word() -> None:
    with warnings.catch_warnings(record=True) as warned, deterministic_kernels():
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.warn("x.y does not have a deterministic implementation, but you set ...", stacklevel=1)
    assert warned == []


def test_strict_refuses_what_has_no_deterministic_kernel() -> None:
    """torch takes fused attention's deterministic backward on CUDA only where it may refuse other operators."""
    before = settings()
    with deterministic_kernels(strict=True):
        assert settings() == (True, False, False, False)
    assert settings() == before
