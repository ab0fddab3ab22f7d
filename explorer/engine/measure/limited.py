"""The limit of memory that a run was given, around one of its steps: what the step finds there counts too."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._pytree import tree_leaves

from explorer.engine.device.device import Device
from explorer.engine.measure.before_step import storage_bytes, tensors_before_step
from explorer.engine.step import Trainee, run_step
from explorer.engine.watch.storages import KnownTensor


def limited_step(device: Device, trainee: Trainee) -> AbstractContextManager[None]:
    """Inside, the trainee and its step hold no more than the limit of its spec. Raises OutOfMemory where the trainee
    alone holds more."""
    return device.limited(trainee.spec.memory_limit_bytes, held_bytes(trainee))


def run_limited(device: Device, trainee: Trainee) -> float:
    """One step within the limit; its loss."""
    with limited_step(device, trainee):
        return run_step(trainee)


def found_before_step(trainee: Trainee) -> list[KnownTensor]:
    """Everything that lies in memory between two steps."""
    return tensors_before_step(trainee.model, trainee.optimizer, tree_leaves((trainee.inputs, trainee.targets)))


def held_bytes(trainee: Trainee) -> int:
    """Bytes between two steps, on the trainee's device."""
    return storage_bytes(found_before_step(trainee), trainee.device)
