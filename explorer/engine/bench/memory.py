"""Tensors in memory outside of a recording: before a step, under a memory limit, and when memory is refused.

The tensors from before a step are the floor of every timeline, and they count towards the memory limit of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from explorer.engine.bench.step import Trainee
from explorer.engine.device.allocator import peak_bytes, workspaces_alive
from explorer.engine.device.device import Device, current_rank, device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.state.bits import storages
from explorer.engine.state.reachable import instances_in_memory
from explorer.engine.state.snapshot import held_by
from explorer.engine.watch.storages import KnownTensor, tensors_in_memory, tensors_of
from explorer.errors import BadInput
from explorer.record.allocations import ROLES, Allocations, Role
from explorer.record.base import column
from explorer.record.graph import RECORDED, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def tensors_before_step(model: nn.Module, optimizers: Optimizers, inputs: Iterable[object]) -> list[KnownTensor]:
    """Parameters and their gradients, buffers, plain tensor attributes of modules, optimizer state, inputs.

    A tensor of several roles has the first of its roles in this order.
    """
    plain = [(fqn, value) for fqn, module in model.named_modules() for value in vars(module).values()]
    return [
        *(KnownTensor(parameter, "parameter", owner(name)) for name, parameter in model.named_parameters()),
        *gradient_tensors(model),
        *(KnownTensor(buffer, "buffer", owner(name)) for name, buffer in model.named_buffers()),
        *(KnownTensor(value, "buffer", fqn) for fqn, value in plain if isinstance(value, torch.Tensor)),
        *optimizer_tensors(model, optimizers),
        *(KnownTensor(leaf, "input", "") for leaf in inputs if isinstance(leaf, torch.Tensor)),
    ]


def gradient_tensors(model: nn.Module) -> list[KnownTensor]:
    """Gradients that parameters hold now."""
    named = model.named_parameters()
    return [KnownTensor(p.grad, "gradient", owner(name)) for name, p in named if p.grad is not None]


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> list[KnownTensor]:
    """The state of one optimizer or of several, each tensor with the block of its parameter."""
    owners: dict[torch.Tensor, str] = {p: owner(name) for name, p in model.named_parameters()}
    return [
        KnownTensor(value, "optimizer state", owners.get(parameter, ""))
        for optimizer in each_optimizer(optimizers)
        for parameter, state in optimizer.state.items()
        for value in tensors_of(state)
    ]


def each_optimizer(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """One optimizer, several or none as a list. Raises BadInput for anything else."""
    if optimizers is None:
        return []
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in several:
        if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
            raise BadInput(
                f"The optimizer is a {type(optimizer).__name__}, and an optimizer of torch is asked for.",
                hint="Give one, or a list of several.",
            )
    return list(several)


def unwatched_parameters(model: nn.Module, optimizers: Optimizers) -> list[KnownTensor]:
    """Parameters that the optimizers step and that lie in no module of `model`."""
    watched = {id(parameter) for parameter in model.parameters()}
    groups = (group for optimizer in each_optimizer(optimizers) for group in optimizer.param_groups)
    others = {id(p): p for group in groups for p in group["params"] if id(p) not in watched}
    return [KnownTensor(parameter, "parameter", "") for parameter in others.values()]


def tensors_beside(model: nn.Module, things: Sequence[object]) -> list[KnownTensor]:
    """Weights of other models among `things`, their gradients, and the state of their optimizers.

    A teacher, a reference model, an average of the weights: no batch size lowers these bytes, so they are no input.
    """
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    weights = [thing for thing in things if isinstance(thing, nn.Parameter)]
    return [
        *(KnownTensor(weight, "parameter", "") for weight in weights),
        *unwatched_parameters(model, optimizers),
        *(KnownTensor(weight.grad, "gradient", "") for weight in weights if weight.grad is not None),
        *optimizer_tensors(model, optimizers),
    ]


def storage_bytes(tensors: Iterable[KnownTensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on `device`, each storage once."""
    everywhere = (storage for tensor in tensors for storage in storages_of(tensor))
    by_address = {storage._cdata: storage for storage in everywhere if storage.device == device}
    return sum(storage.nbytes() for storage in by_address.values())


def storages_of(named: KnownTensor) -> Sequence[torch.UntypedStorage]:
    """Storages behind a tensor, or the storage itself where no tensor leads to it."""
    return storages(named.tensor) if isinstance(named.tensor, torch.Tensor) else (named.tensor,)


def owner(name: str) -> str:
    """fqn of the block that holds the parameter or buffer `name`."""
    return name.rpartition(".")[0]


def memory_limit(device: Device, trainee: Trainee) -> AbstractContextManager[None]:
    """Limits the trainee and its step to the spec's memory. Raises OutOfMemory if the trainee alone holds more."""
    limit_bytes = trainee.spec.memory_limit_bytes
    return device.memory_limit(limit_bytes, 0 if limit_bytes is None else bytes_before_step(trainee))


def trainee_tensors(trainee: Trainee) -> list[KnownTensor]:
    """All tensors in memory between two steps."""
    batch = tree_leaves((trainee.inputs, trainee.targets))
    objects = held_by(trainee.functions)
    buffers = {id(buffer) for part in objects if isinstance(part, nn.Module) for buffer in part.buffers()}
    tensors = tensors_before_step(trainee.model, trainee.optimizer, batch)
    for part in objects:
        if isinstance(part, torch.Tensor):
            role: Role = "buffer" if id(part) in buffers else "input"
            tensors.append(KnownTensor(part, "parameter" if isinstance(part, nn.Parameter) else role, ""))
    return tensors


def bytes_before_step(trainee: Trainee) -> int:
    """Bytes between two steps, on the trainee's device."""
    return storage_bytes(trainee_tensors(trainee), trainee.device)


@dataclass
class FirstPeak:
    """Peak of a trainee's first step, seen by the allocator alone."""

    is_read: bool = True
    n_bytes: int | None = None

    @contextmanager
    def reading(self, trainee: Trainee) -> Iterator[None]:
        """Unless it `is_read`, the context of a part of the step. Optimizer state that the part makes counts in earlier
        parts too, as in later steps."""
        if self.is_read:
            yield
            return
        recorder, base_bytes = device_of(trainee.device).recorder(), bytes_before_step(trainee)
        before_bytes = storage_bytes(optimizer_tensors(trainee.model, trainee.optimizer), trainee.device)
        with recorder:
            yield
        state_bytes = storage_bytes(optimizer_tensors(trainee.model, trainee.optimizer), trainee.device)
        earlier_bytes = (self.n_bytes or 0) + state_bytes - before_bytes
        self.n_bytes = max(earlier_bytes, peak_bytes(recorder.log, base_bytes))


_Row = tuple[int, int, int]
"""Bytes, role and block of an entry."""


def _without_tensors(gpu: torch.device, tensors: Mapping[int, _Row]) -> list[_Row]:
    """What the GPU holds beside tensors, given by address: cuBLAS's workspaces, and the rest."""
    workspaces = workspaces_alive(gpu, tensors)
    rest = torch.cuda.memory_allocated(gpu) - sum(row[0] for row in tensors.values()) - sum(workspaces)
    rows = [(n_bytes, ROLES.index("cuBLAS workspace"), 0) for n_bytes in workspaces]
    return [*rows, (rest, ROLES.index("unattributed"), 0)] if rest > 0 else rows


def memory_at_refusal(
    model: nn.Module, optimizers: Optimizers, device: Device, *, where: str, error: Exception
) -> Measurement:
    """Tensors that Python can reach, by role and block. On a GPU the allocator's other bytes are unattributed.

    Tensors that autograd alone holds cannot be reached on the CPU. `error` is the error that ended the step.
    """
    blocks = tuple(dict(model.named_modules()))
    number = {fqn: i for i, fqn in enumerate(blocks)}
    in_memory = [*tensors_in_memory(), *instances_in_memory(torch.optim.Optimizer)]
    tensors = [*tensors_before_step(model, optimizers, ()), *tensors_beside(model, in_memory)]
    tensors += [KnownTensor(thing, "unattributed", "") for thing in in_memory if isinstance(thing, torch.Tensor)]
    rows: dict[int, _Row] = {}
    for entry in tensors:
        for storage in storages_of(entry) if entry.tensor.device == device.torch else ():
            row = (storage.nbytes(), ROLES.index(entry.role), number.get(entry.owner, 0))
            if storage.nbytes():
                rows.setdefault(storage.data_ptr(), row)
    entries = list(rows.values())
    if device.torch.type == "cuda":
        entries += _without_tensors(device.torch, rows)
    n_bytes, roles, owners = (column(values) for values in (zip(*entries) if entries else ((), (), ())))
    n, (rank, n_ranks) = len(entries), current_rank() or (None, None)
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
            n_bytes=n_bytes,
            born=column([0] * n),
            died=column([1] * n),
            role=roles,
            block=owners,
            op=column([0] * n),
            blocks=blocks,
            ops=("",),
            time_ns=column(),
        ),
        failure=failure_in_step(error),
    )
