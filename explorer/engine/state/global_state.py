"""Settings of the whole process: those that a run moves are restored, and those that judged runs need are set.

Two equal runs need deterministic kernels to give equal bits: atomics, autotuning and fresh memory prevent this on a
GPU. Judged runs also do without TensorFloat-32, float32 products on ten bits of mantissa: a gradient through a dozen
convolutions lies a tenth of its norm from exact, too far for a float64 reference. Timed runs use what training uses.
cuBLAS also needs CUBLAS_WORKSPACE_CONFIG before CUDA starts: the worker process sets the variable.
Sources: https://docs.pytorch.org/docs/stable/notes/randomness.html and .../notes/cuda.html
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.backends import cudnn
from torch.utils import deterministic

from explorer.engine.state.rng import RngState

_FRESH_MEMORY: Any = deterministic
"""The module with the property `fill_uninitialized_memory`, which torch's type stubs lack."""


@contextmanager
def preserve_global_state() -> Iterator[None]:
    """Restores thread count, generators, gradient mode and autocast's cache after a run, also after an exception."""
    n_threads, rng, grad = torch.get_num_threads(), RngState.capture(None), torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        rng.restore()
        torch.set_num_threads(n_threads)
        torch.clear_autocast_cache()


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
    _set(cudnn, "benchmark", False)
    try:
        with warnings.catch_warnings():
            for words in ("does not have a deterministic implementation", "defaults to a non-deterministic algorithm"):
                warnings.filterwarnings("ignore", message=f".*{words}.*")
            yield
    finally:
        _set(cudnn, "benchmark", benchmark)
        _FRESH_MEMORY.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


def _set(switches: object, name: str, value: object) -> None:
    """Sets a switch of torch.backends, also where torch.testing has forbidden it (`disable_global_flags`)."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        setattr(switches, name, value)


def tf32_kinds() -> tuple[str, ...]:
    """Kinds of operators that may use TF32: `convolutions`, `recurrent layers`, `matrix products`."""
    return tuple(kind for kind, switch in _switches().items() if switch.fp32_precision == "tf32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Computes every product in full float32.

    torch has old and new switches and refuses to read an old switch that disagrees with a new one. A model may read
    the old switches, so the old switches are set unless a new one is in use.
    """
    cudnn: Any = torch.backends.cudnn
    with ExitStack() as stack:
        try:
            stack.callback(_set, cudnn, "allow_tf32", cudnn.allow_tf32)
            _set(cudnn, "allow_tf32", False)
        except RuntimeError:
            _switch_off(stack, "convolutions", "recurrent layers")
        try:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            _switch_off(stack, "matrix products")
        yield


def _switch_off(stack: ExitStack, *kinds: str) -> None:
    for switch in (_switches()[kind] for kind in kinds):
        stack.callback(_set, switch, "fp32_precision", switch.fp32_precision)
        _set(switch, "fp32_precision", "ieee")


def _switches() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
        "matrix products": backends.cuda.matmul,
    }
