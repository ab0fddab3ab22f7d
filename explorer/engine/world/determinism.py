"""Settings under which two equal runs give equal bits: atomics, autotuning and fresh memory prevent this on a GPU.

Only compared runs use these settings; timed runs use the kernels that training uses.
cuBLAS also needs CUBLAS_WORKSPACE_CONFIG before CUDA starts: the worker process sets the variable.
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
"""The module with the property `fill_uninitialized_memory`, which torch's type stubs lack."""


@contextmanager
def deterministic_kernels(*, strict: bool = False) -> Iterator[None]:
    """Deterministic kernels, if an operator has one. The baseline's rerun shows the effect of other operators.

    `strict` makes other operators raise. Fused attention on CUDA uses its deterministic backward only if `strict`.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = _FRESH_MEMORY.fill_uninitialized_memory, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    _FRESH_MEMORY.fill_uninitialized_memory = False  # costs a write of every tensor, and hides early reads
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
