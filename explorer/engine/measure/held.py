"""Tensors in memory when memory is refused in a step without a recording: bytes by role and block, no timeline."""

from __future__ import annotations

import torch
from torch import nn

from explorer.engine.device.device import Device
from explorer.engine.device.limits import failure_in_step
from explorer.engine.device.rank import rank_here
from explorer.engine.measure.before_step import tensors_before_step
from explorer.engine.state.bits import storages
from explorer.engine.watch.storages import KnownTensor, tensors_in_memory
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import column
from explorer.record.graph import RECORDED, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec


def held_at_refusal(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: Device, *, where: str, error: Exception
) -> Measurement:
    """Tensors that Python can reach, by role and block. On a GPU the allocator's other bytes are unattributed.

    Tensors that autograd alone holds cannot be reached on the CPU. `error` is the error that ended the step.
    """
    blocks = tuple(dict(model.named_modules()))
    number = {fqn: i for i, fqn in enumerate(blocks)}
    known = tensors_before_step(model, optimizer, ())
    known += [KnownTensor(one, "unattributed", "") for one in tensors_in_memory()]
    rows: dict[int, tuple[int, int, int]] = {}
    for thing in known:
        for storage in storages(thing.tensor) if thing.tensor.device.type == device.torch.type else ():
            row = (storage.nbytes(), ROLES.index(thing.role), number.get(thing.owner, 0))
            if storage.nbytes():
                rows.setdefault(storage._cdata, row)
    entries = list(rows.values())
    if device.torch.type == "cuda":
        rest = torch.cuda.memory_allocated(device.torch) - sum(row[0] for row in entries)
        entries += [(rest, ROLES.index("unattributed"), 0)] if rest > 0 else []
    n, (rank, n_ranks) = len(entries), rank_here() or (None, None)
    return Measurement(
        spec=RunSpec(
            model=ModelRef(target=f"{RECORDED}{where}"),
            device="cuda" if device.torch.type == "cuda" else "cpu",
            optimizer="none",
            n_repeats=0,
        ),
        environment=device.environment(torch.get_num_threads()),
        origin="recorded",
        recorded_in=where,
        rank=rank,
        n_ranks=n_ranks,
        allocations=Allocations(
            n_ticks=0,
            n_bytes=column(row[0] for row in entries),
            born=column([0] * n),
            died=column([1] * n),
            role=column(row[1] for row in entries),
            block=column(row[2] for row in entries),
            op=column([0] * n),
            blocks=blocks,
            ops=("",),
            time_ns=column(),
        ),
        failure=failure_in_step(error),
    )
