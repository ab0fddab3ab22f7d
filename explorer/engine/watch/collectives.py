"""Collectives of a step, and what the buffers of FSDP2 and DDP are for, read from torch's own calls.

A collective is an operator of `c10d` or `_c10d_functional`. A buffer has no such mark: torch.distributed allocates it
with `torch.empty`. The Python frame that allocates tells its purpose:

    torch/distributed/fsdp, a function of a reduction     reduce-scatter buffer; the shard's gradient lies in its result
    torch/distributed/fsdp, elsewhere                     gathered parameter, and the buffer that is gathered into
    torch/nn/parallel/distributed.py (Reducer, C++)       gradient bucket
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from explorer.engine.state.bits import tensor_leaves
from explorer.engine.watch.modes import DispatchMode
from explorer.engine.watch.storages import KnownTensor
from explorer.record.allocations import CollectiveKind, Role

KINDS: dict[str, CollectiveKind] = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "send": "point to point",
    "recv": "point to point",
}
NAMESPACES = ("c10d", "_c10d_functional")
FSDP, DDP = "torch.distributed.fsdp", "torch.nn.parallel.distributed"
INTERNAL = (
    "torch._", "torch.utils", "torch.overrides", "torch.autograd", "torch.library", "torch.profiler", "explorer.",
    "torch.distributed.tensor", "contextlib",
)  # fmt: skip
"""Modules whose frames stand between an operator and the code that asked for it."""
MOST_FRAMES = 60


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def dtensor_type() -> type | None:
    """DTensor, if this process has imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def kind_of(func: Any) -> CollectiveKind | None:
    """The kind of collective that an operator is, or None."""
    if getattr(func, "namespace", "") not in NAMESPACES:
        return None
    name = func._schema.name.partition("::")[2].replace("_", "")
    return next((kind for part, kind in KINDS.items() if name.startswith(part)), None)


def payload_bytes(args: Iterable[object], out: object) -> int:
    """Bytes of the whole tensor: the largest of the operator's arguments and its result, lists summed up."""
    return max(sum(tensor.nbytes for tensor in tensor_leaves(part)) for part in (*args, out))


def group_size(args: Iterable[object]) -> int:
    """Processes of the operator's group; 1 if the group cannot be read."""
    for argument in args:
        try:
            if isinstance(argument, torch.ScriptObject):
                group: Any = torch.distributed.ProcessGroup.unbox(argument)  # type: ignore[attr-defined]
                return int(group.size())
            if isinstance(argument, str):
                resolve: Any = vars(torch.distributed.distributed_c10d)["_resolve_process_group"]
                return int(resolve(argument).size())
        except Exception:  # a ReduceOp, or the name of one
            continue
    return 1


def buffer_role(dtype: torch.dtype | None = None) -> Role | None:
    """The role of a storage that is allocated now; None if neither FSDP2 nor DDP asked for it.

    DDP also keeps tables of numbers, which `dtype` tells from its buckets.
    """
    for frame in _frames():
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(FSDP):
            around = (frame, frame.f_back, frame.f_back.f_back if frame.f_back else None)
            reduces = any(part is not None and "reduce" in part.f_code.co_name for part in around)
            return "reduce-scatter buffer" if reduces else "gathered parameter"
        if name == DDP:
            return "gradient bucket" if dtype is None or dtype.is_floating_point else None
        if not name.startswith(INTERNAL):
            return None
    return None


def unit_now() -> nn.Module | None:
    """The module that FSDP2 gathers or reduces now, or None."""
    for frame in _frames():
        group = frame.f_locals.get("self")
        if type(group).__name__ == "FSDPParamGroup":
            modules = getattr(group, "modules", ())
            return modules[0] if modules else None
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


@contextmanager
def watching_resizes(notice: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `notice` after each change of a storage's size. FSDP2 frees and takes gathered parameters that way."""
    kind: Any = torch.UntypedStorage
    plain = kind.resize_

    def resize_(storage: Any, *args: Any, **kwargs: object) -> object:
        out = plain(storage, *args, **kwargs)
        notice(storage)
        return out

    kind.resize_ = resize_
    try:
        yield
    finally:
        if kind.__dict__.get("resize_") is resize_:  # not if another library has replaced it meanwhile
            del kind.resize_


class Buckets(DispatchMode):
    """Gradient buckets of DDP that are allocated between enter and exit.

    Its reducer in C++ holds them, and no Python object leads there. The mode has to be on while DDP is made and takes
    its first steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        return self.noticed(func, func(*args, **(kwargs or {})))

    def noticed(self, func: object, out: Any) -> object:
        """The result of an operator, which may be a bucket."""
        is_buffer = func is torch.ops.aten.empty.memory_format and out.is_floating_point()
        if is_buffer and buffer_role() == "gradient bucket":
            self._storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self) -> list[KnownTensor]:
        """The buckets that DDP holds now."""
        storages = (reference() for reference in self._storages)
        return [KnownTensor(storage, "gradient bucket", "") for storage in storages if storage is not None]
