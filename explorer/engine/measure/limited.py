"""The memory limit of a run around one of its steps. Tensors from before the step count towards the limit."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._pytree import tree_leaves

from explorer.engine.device.device import Device
from explorer.engine.measure.before_step import storage_bytes, tensors_before_step
from explorer.engine.step import Trainee, run_step
from explorer.engine.watch.storages import KnownTensor


def limited_step(device: Device, trainee: Trainee) -> AbstractContextManager[None]:
    """Limits the trainee and its step to the spec's memory. Raises OutOfMemory if the trainee alone holds more."""
    return device.limited(trainee.spec.memory_limit_bytes, held_bytes(trainee))


def run_limited(device: Device, trainee: Trainee) -> float:
    """Runs one step within the limit and returns the loss."""
    with limited_step(device, trainee):
        return run_step(trainee)


def found_before_step(trainee: Trainee) -> list[KnownTensor]:
    """All tensors in memory between two steps."""
    return tensors_before_step(trainee.model, trainee.optimizer, tree_leaves((trainee.inputs, trainee.targets)))


def held_bytes(trainee: Trainee) -> int:
    """Bytes between two steps, on the trainee's device."""
    return storage_bytes(found_before_step(trainee), trainee.device)
