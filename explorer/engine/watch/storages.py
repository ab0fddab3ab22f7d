"""Birth, operator, role and death of each storage during a step, and the calls of blocks that take and return storages.

Storages are numbered in order of birth. A storage that is resized dies and is born again. References are weak, because
a watcher must not keep storages alive.
"""

from __future__ import annotations

import gc
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from explorer.engine.device.allocator import Ints
from explorer.engine.state.bits import parts, storages
from explorer.engine.state.reachable import data_inside
from explorer.record.allocations import RANK_ROLES, ROLES, Calls, Role
from explorer.record.base import column

NONE = -1
"""No storage, no operator, no role: in the columns of one process, never in a record."""
BUFFERS = {NONE, *(ROLES.index(role) for role in RANK_ROLES)}
"""Roles that a tag replaces: the gradient of a shard lies in the result of its reduction."""
META = torch.device("meta")
"""To compare with: the name of a device takes four times as long."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose storage has an address, except the zero of forward differentiation."""
UNENDED = 2**62
"""Later than any time in ns."""


@dataclass
class KnownTensor:
    """A tensor that exists before the step."""

    tensor: torch.Tensor | torch.UntypedStorage
    role: Role
    owner: str
    """fqn of the tensor's block."""


class _Watched(weakref.ref[Any]):
    """A weak reference to a storage, with its number."""

    __slots__ = ("index", "key")
    index: int
    key: int


class Storages:
    """One column for each property, one row for each storage.

    `made_by` is the operator that first returned a storage, NONE if the storage is older than the step. `turns` is the
    order of all births (number + 1) and deaths (its negative).
    """

    def __init__(self, device: torch.device, owners: Mapping[str, int]) -> None:
        """`owners` are the blocks' numbers by fqn; a storage of an unknown block belongs to the model, number 0."""
        self.pointer, self.n_bytes, self.made_by = array("q"), array("q"), array("q")
        self.role, self.owner, self.dtype = array("q"), array("q"), array("q")
        self.dtypes: dict[torch.dtype | None, int] = {None: 0}
        """The number of each type in `dtype`."""
        self.seen_ns, self.died_ns = array("q"), array("q")
        """Times at which each storage was first seen, and died."""
        self.n_before_step = 0
        """Number of storages that are older than the step."""
        self.turns = array("q")
        self._owners = owners
        self._is_here = attrgetter(f"is_{device.type}")
        self._live: dict[int, _Watched] = {}

    def forget(self) -> None:
        """Stops watching; the columns stay."""
        self._live.clear()

    def tag(self, things: Iterable[KnownTensor]) -> None:
        """Gives a role to storages without one; unknown storages are added."""
        for thing in things:
            tensor = thing.tensor
            if isinstance(tensor, torch.Tensor) and not self._is_here(tensor):
                continue
            for storage in [tensor] if isinstance(tensor, torch.UntypedStorage) else _storages(tensor):
                index = self.see(storage, NONE, getattr(tensor, "dtype", None))
                if index != NONE and self.role[index] in BUFFERS:
                    self.role[index] = ROLES.index(thing.role)
                    self.owner[index] = self._owners.get(thing.owner, 0)

    def see_all(self, out: Any, op: int) -> None:
        """Notes every storage in the result of operator number `op`."""
        if isinstance(out, torch.Tensor):
            if self._is_here(out):
                for storage in _storages(out):
                    self.see(storage, op, out.dtype)
        elif isinstance(out, (tuple, list)):
            for part in out:
                self.see_all(part, op)

    def see(self, storage: torch.UntypedStorage, op: int, dtype: torch.dtype | None = None) -> int:
        """Number of the storage, born now if it is new or resized; NONE for a storage without bytes."""
        key, n_bytes = storage._cdata, storage.nbytes()
        watched = self._live.get(key)
        if watched is not None:
            if self.n_bytes[watched.index] == n_bytes:
                return watched.index
            self._died(watched)
        if not n_bytes:
            return NONE
        index = len(self.n_bytes)
        self.pointer.append(_address(storage))
        self.n_bytes.append(n_bytes)
        self.made_by.append(op)
        self.role.append(NONE)
        self.owner.append(NONE)
        self.dtype.append(self.dtypes.setdefault(dtype, len(self.dtypes)))
        self.seen_ns.append(time.time_ns())
        self.died_ns.append(NONE)
        self.turns.append(index + 1)
        watched = self._live[key] = _Watched(storage, self._died)
        watched.index, watched.key = index, key
        return index

    def of(self, values: object) -> list[int]:
        """Numbers of the watched storages behind the tensors in `values`, each once."""
        storages = (storage for tensor in tensors_of(values) if self._is_here(tensor) for storage in _storages(tensor))
        return list(dict.fromkeys(live.index for storage in storages if (live := self._live.get(storage._cdata))))

    def _died(self, watched: _Watched) -> None:
        if self._live.get(watched.key) is watched:
            del self._live[watched.key]
            self.turns.append(-watched.index - 1)
            self.died_ns[watched.index] = time.time_ns()

    def name_since(self, first: int, role: Role, owner: int) -> None:
        """Gives `role` to the storages from number `first` on, which belong to block number `owner`."""
        for index in range(first, len(self.role)):
            self.role[index], self.owner[index] = ROLES.index(role), owner


class CallLog:
    """Forward calls of blocks in order of begin; a checkpoint keeps a call's inputs. Storages are numbers."""

    def __init__(self) -> None:
        self.block, self.first_ns, self.last_ns = array("q"), array("q"), array("q")
        self.inputs: list[Sequence[int]] = []
        self.outputs: list[Sequence[int]] = []

    def begin(self, block: int, storages: Sequence[int]) -> int:
        """Adds a call that begins now and returns its number."""
        self.block.append(block)
        self.first_ns.append(time.time_ns())
        self.last_ns.append(UNENDED)
        self.inputs.append(storages)
        self.outputs.append(())
        return len(self.block) - 1

    def end(self, call: int, storages: Sequence[int]) -> None:
        """Ends call number `call` now. A call without an end, after an error, lasts to the end of the step."""
        self.last_ns[call] = time.time_ns()
        self.outputs[call] = storages

    def record(self, tick_ns: Ints, entry_of: Ints) -> Calls:
        """The calls on a timeline: tick i + 1 is at `tick_ns[i]`, and storage s has the entry `entry_of[s]`, or -1."""

        def entries_of(storages: Sequence[int]) -> list[int]:
            return [entry for entry in (int(entry_of[storage]) for storage in storages) if entry >= 0]

        inputs, outputs = ([entries_of(storages) for storages in side] for side in (self.inputs, self.outputs))
        return Calls(
            block=column(self.block),
            first_tick=column(np.searchsorted(tick_ns, np.asarray(self.first_ns), side="right").tolist()),
            end_tick=column(np.searchsorted(tick_ns, np.asarray(self.last_ns), side="right").tolist()),
            n_inputs=column(len(entries) for entries in inputs),
            n_outputs=column(len(entries) for entries in outputs),
            entries=column(entry for pair in zip(inputs, outputs) for entries in pair for entry in entries),
        )


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in `values`, in the order of torch.utils._pytree.tree_leaves, which takes ten times as long.

    Dataclasses, which tree_leaves does not enter, are entered too: attention layers return such intermediates.
    """
    kind = type(values)
    if isinstance(values, torch.Tensor):
        yield values
    elif kind is tuple or kind is list:
        for value in values:
            yield from tensors_of(value)
    elif kind is dict:
        for value in values.values():
            yield from tensors_of(value)
    elif is_dataclass(kind) and not issubclass(kind, Mapping):
        yield from (value for value in data_inside((values,)) if isinstance(value, torch.Tensor))
    elif values is not None and kind not in (bool, int, float, str):
        yield from (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def tensors_in_memory() -> list[torch.Tensor]:
    """Every tensor with bytes that Python can reach; a compiler also keeps tensors without bytes."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and _has_bytes(thing)]


def _has_bytes(tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        is_real = tensor.layout is torch.strided and storage.device == tensor.device  # fake tensors are on "meta"
        return is_real and storage.nbytes() > 0 and storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # fake, functional, sparse or half-built tensors
        return False


def _address(storage: torch.UntypedStorage) -> int:
    """The storage's address; 0 of a fake tensor, because torch warns of a question for the address."""
    return 0 if storage.device == META else storage.data_ptr()


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """As `bits.storages`, plus storages of tensors without data, whose bytes a prediction counts."""
    try:
        storage = tensor.untyped_storage()
        if type(tensor) not in PLAIN or tensor._is_zerotensor():
            _address(storage)
    except (NotImplementedError, RuntimeError):  # sparse; a wrapper such as a DTensor
        return storages(tensor) or [part.untyped_storage() for part in parts(tensor) if part.layout is torch.strided]
    return (storage,)
