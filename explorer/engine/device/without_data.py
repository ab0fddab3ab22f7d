"""Builds models of any size on any machine: parameters have shapes and types, but no memory.

Each parameter becomes a fake tensor when the module registers it, so at most one real parameter exists at a time.
Results of fake tensors are fake. Masks, positions and the batch are real, because a model may read their values.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    is_fake,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from explorer.errors import ExplorerError, ModelFailed, message_of, said_by

GROUP_FUNCTIONS = frozenset(("get_world_size", "get_rank"))
WHOLE_MODEL = (
    "Build the whole model, and let --fsdp, --tp or --parallelize FILE.py:FUNCTION split it; or watch its own training "
    "under torchrun."
)
LEFT_OUT = (
    "Predicted: the step was played on tensors without data. What kernels take for themselves is not in it (fused "
    "attention, recurrent layers, convolutions)."
)
ON_THE_CPU = (
    f"{LEFT_OUT[:-1]}, nor what an allocator rounds or keeps.",
    "Predicted on the CPU's kernels: a GPU may take others, with other saved activations. Name a card to have it "
    "played by CUDA's rules.",
)
CPU_AUTOCAST = (
    "Predicted by the CPU's autocast: CUDA's lists of operators differ, and a GPU was measured to hold up to 12 % more."
)
Cast = Callable[[torch.dtype], torch.dtype]
_active = 0


def as_built(dtype: torch.dtype) -> torch.dtype:
    """A Cast that casts nothing."""
    return dtype


def is_without_data() -> bool:
    """Whether models are currently built without memory."""
    return _active > 0


@contextmanager
def without_data(cast: Cast = as_built) -> Iterator[None]:
    """Modules built inside have parameters without memory; `cast` maps the types of the parameters."""
    global _active
    registered, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    applied = nn.Module._apply
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        registered(module, name, parameter)
        if parameter is None or is_lazy(parameter):  # a lazy one has no shape yet, and is built with memory
            return
        if parameter.device.type == "cpu" and not is_fake(parameter):
            with mode:
                form = parameter.shape, parameter.stride()
                empty: Any = torch.empty_strided(*form, dtype=cast(parameter.dtype), device="cpu")
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def trunc_normal(tensor: Any, *args: Any, **kwargs: Any) -> Any:  # torch draws until the values fit
        return tensor if is_fake(tensor) else truncated(tensor, *args, **kwargs)

    nn.Module._apply = _conversion(mode)  # type: ignore[method-assign, assignment]
    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    nn.init._no_grad_trunc_normal_ = trunc_normal
    _active += 1
    quiet = logging.getLogger("torch._subclasses.fake_tensor")  # the error repeats the log's message
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _UndrawnWeights(mode):
            # Watchers read the address of a storage; a fake storage has none and warns about the read.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        nn.Module.register_parameter = registered  # type: ignore[method-assign]
        nn.Module._apply = applied  # type: ignore[method-assign]
        nn.init._no_grad_trunc_normal_ = truncated
        _active -= 1
        quiet.setLevel(level)


@contextmanager
def generator_states_as_results() -> Iterator[None]:
    """Makes the state of the CPU's generator the result of an operator, so that a tracker sees it live and die.

    Each torch.utils.checkpoint call keeps the state until its backward, in memory of the step's own device.
    """
    plain = torch.get_rng_state
    torch.get_rng_state = lambda: plain().clone()
    try:
        yield
    finally:
        torch.get_rng_state = plain


def _conversion(mode: FakeTensorMode) -> object:
    """A replacement of nn.Module._apply, which `model.bfloat16()` calls: each parameter is replaced by a new one.

    torch would swap fake parameters in place, and refuses to while a fake mode refers to them. Parameters that were
    built on meta become fake in `to_empty`, under `mode`.
    """
    converted: dict[int, tuple[object, Any]] = {}
    """By id: a parameter, and what it became. A tied parameter becomes one parameter."""

    def convert(module: nn.Module, change: Callable[[object], Any], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with torch.no_grad(), mode if parameter.is_meta else nullcontext():
                    new = converted.get(id(parameter), (None, None))[1]
                    new = nn.Parameter(change(parameter), parameter.requires_grad) if new is None else new
                converted[id(parameter)] = parameter, new
                module._parameters[name] = new
        module._buffers.update({name: b if b is None else change(b) for name, b in module._buffers.items()})
        return module

    return convert


DRAWN = (torch.empty, torch.randn, torch.rand, torch.normal)
SMALL_WEIGHT = 2**16
"""Elements. Smaller tensors cost nothing, and a model may read them."""


class _UndrawnWeights(TorchFunctionMode):
    """Large tensors that a module's constructor draws have no data from the start: they become parameters."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if function not in DRAWN or not _in_constructor(sys._getframe(1)):
            return function(*args, **(kwargs or {}))
        with self.mode:
            undrawn = function(*args, **(kwargs or {}))
        is_large = undrawn.numel() >= SMALL_WEIGHT and undrawn.device.type == "cpu"
        return undrawn if is_large else function(*args, **(kwargs or {}))


def _in_constructor(frame: Any) -> bool:
    """Whether a frame or a frame around it is the `__init__` of a module."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


@contextmanager
def explained(target: str) -> Iterator[None]:
    """Raises ModelFailed in words for a model that no step without data or no step of one process can run.

    Such a model branches on computed values, or its own code calls torch.distributed and wants another process group.
    """
    try:
        yield
    except ExplorerError:
        raise
    except Exception as error:
        if _splits_itself(error):
            group = "without a process group"
            if distributed.is_available() and distributed.is_initialized():
                group = f"in a group of {distributed.get_world_size()}"
            fault, hint = f"called torch.distributed {group} and raised {said_by(error)}", WHOLE_MODEL
            raise ModelFailed(f"{target} is split by its own code, which {fault}.", hint=hint) from error
        hint = "Measure a smaller build of it instead, by --set."
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            fault = f"without its data: it decides by values that it computes ({error.func})"
        elif isinstance(error, UnsupportedFakeTensorException):
            fault = "without its data: it holds a tensor that torch makes with data alone, such as a sparse one"
        elif isinstance(error, RuntimeError) and message_of(error).startswith("Expected inputs of BF16 type"):
            fault = "in float32: without data, torch knows the grouped product of routed experts in bfloat16 alone"
            hint = f"Add --dtype bfloat16, or m{hint[1:]}"
        else:
            raise
        raise ModelFailed(f"{target} cannot be predicted {fault}.", hint=hint) from error


@contextmanager
def fake_group(rank: int, n_ranks: int) -> Iterator[None]:
    """This process is `rank` of a group of `n_ranks`, none of which exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _splits_itself(error: BaseException) -> bool:
    """Whether a model called torch.distributed where `error` came from, or itself raised it beside such a call."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__', '')}." for frame in frames]
    is_own = [not name.startswith(("torch.", "explorer.", "contextlib.")) for name in names]
    calls = any(
        is_caller
        and name.startswith(("torch.distributed.", "torch.nn.parallel.distributed."))
        and not frame.f_code.co_name.startswith("__torch_")
        for is_caller, name, frame in zip(is_own, names[1:], frames[1:])
    )
    return calls or (is_own[-1] and not GROUP_FUNCTIONS.isdisjoint(frames[-1].f_code.co_names))


def cast_buffers(model: nn.Module, cast: Cast) -> None:
    """Casts the buffers of `model`. Buffers are real; `without_data` has already cast the parameters."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(cast(buffer.dtype))
