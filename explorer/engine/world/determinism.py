"""Two equal runs shall give equal bits: atomics, autotuning and fresh memory are what keeps them from it on a GPU.

Only runs that are judged take place in here; runs that are timed use the kernels that training uses.
cuBLAS also needs CUBLAS_WORKSPACE_CONFIG before CUDA starts: the worker process sets it.
Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cudnn
from torch.utils import deterministic

_FRESH_MEMORY: Any = deterministic
"""A module with a property, which torch's own types do not know."""


@contextmanager
def deterministic_kernels(*, strict: bool = False) -> Iterator[None]:
    """Where an operator has no deterministic kernel it runs as it is, and the rerun of the baseline tells.

    `strict` lets it raise instead. Fused attention on CUDA has a deterministic backward and takes it only then.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = _FRESH_MEMORY.fill_uninitialized_memory, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    _FRESH_MEMORY.fill_uninitialized_memory = False  # costs a write of every tensor, and hides who reads too early
    cudnn.benchmark = False
    try:
        with warnings.catch_warnings():
            for words in ("does not have a deterministic implementation", "defaults to a non-deterministic algorithm"):
                warnings.filterwarnings("ignore", message=f".*{words}.*")
            yield
    finally:
        cudnn.benchmark = benchmark
        _FRESH_MEMORY.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
