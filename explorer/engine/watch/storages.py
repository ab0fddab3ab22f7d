"""Birth, operator, role and death of each storage during a step, and the calls of blocks that take and return storages.

Storages are numbered in order of birth. A storage that is resized dies and is born again. References are weak, because
a watcher must not keep storages alive.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import accumulate
from time import time_ns
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from explorer.engine.device.allocator import Ints
from explorer.engine.device.kernel_memory import KernelMemory
from explorer.engine.state.bits import parts, storages
from explorer.engine.state.reachable import data_inside, instances_in_memory
from explorer.record.allocations import RANK_ROLES, ROLES, Calls, Role
from explorer.record.base import column

NONE = -1
"""No storage, no operator, no role: in the columns of one process, never in a record."""
UNTAGGED = (NONE, NONE)
"""Role and owner of a storage without a tag."""
BUFFERS = {NONE, *(ROLES.index(role) for role in RANK_ROLES)}
"""Roles that a tag replaces: the gradient of a shard lies in the result of its reduction."""
META = torch.device("meta")
"""To compare with: the name of a device takes four times as long."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that wrap no other tensors."""
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
    """A weak reference to a storage, with its number, its address as an object and its bytes."""

    __slots__ = ("index", "key", "n_bytes")
    index: int
    key: int
    n_bytes: int


class Storages:
    """Births and deaths of storages. The columns, one row for each storage, are made by `settle`.

    While the step runs, births and deaths fill two flat lists: a list takes several numbers at once, and the garbage
    collector does not visit numbers. `made_by` is the operator that first returned a storage, NONE if the storage is
    older than the step. `turns` is the order of all births (number + 1) and deaths (its negative).
    """

    kernels: KernelMemory | None = None
    """In a step without data: what kernels hold beside their results."""

    def __init__(self, device: torch.device, owners: Mapping[str, int]) -> None:
        """`owners` are the blocks' numbers by fqn; a storage of an unknown block belongs to the model, number 0."""
        self.n_seen = self.n_before_step = 0
        """Number of storages so far, and of those that are older than the step."""
        self._births: list[Any] = []
        """Address, bytes, operator, type and stream of each storage in sequence."""
        self._turns: list[int] = []
        """Turn and time of each birth and death in sequence."""
        self._tags: dict[int, tuple[int, int]] = {}
        """Role and owner of each storage that has a role."""
        self._owners = owners
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        """Streams of a step without data, in which FSDP2 takes its buffers, in order of use."""
        self._device = device
        self._live: dict[int, _Watched] = {}
        self._on_death = self._died  # one object for all
        self.settle()

    @property
    def n_turns(self) -> int:
        """Number of births and deaths so far."""
        return len(self._turns) // 2

    def forget(self) -> None:
        """Stops watching and makes the columns."""
        self._live.clear()
        self.settle()

    def settle(self) -> None:
        """Makes the columns of everything seen so far."""
        self.pointer, self.n_bytes, self.made_by = (array("q", self._births[i::5]) for i in range(3))
        types = self._births[3::5]
        self.dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys([None, *types]))}
        """The number of each type in `dtype`."""
        self.dtype = array("q", map(self.dtypes.__getitem__, types))
        self.stream = array("q", self._births[4::5])
        tags = [self._tags.get(index, UNTAGGED) for index in range(self.n_seen)]
        self.role, self.owner = array("q", (role for role, _ in tags)), array("q", (owner for _, owner in tags))
        self.turns = array("q", self._turns[::2])
        times = list(accumulate(self._turns[1::2], max))  # a birth is dated to the end of its operator
        self.seen_ns = array("q", (time_ns for turn, time_ns in zip(self.turns, times) if turn > 0))
        died = {-turn - 1: time_ns for turn, time_ns in zip(self.turns, times) if turn < 0}
        self.died_ns = array("q", (died.get(index, NONE) for index in range(self.n_seen)))

    def tag(self, things: Iterable[KnownTensor]) -> None:
        """Gives a role to storages without one; unknown storages are added."""
        for thing in things:
            if isinstance(thing.tensor, torch.Tensor):
                self.tag_tensor(thing.tensor, thing.role, thing.owner)
            else:
                self._tag(self.see(thing.tensor, NONE), thing.role, thing.owner)

    def tag_tensor(self, tensor: torch.Tensor, role: Role, owner: str) -> None:
        """Gives `role` to the storages of one tensor, which belongs to the block `owner`."""
        if tensor.device == self._device:
            for storage in _storages(tensor):
                self._tag(self.see(storage, NONE, tensor.dtype), role, owner)

    def _tag(self, index: int, role: Role, owner: str) -> None:
        if index != NONE and self._tags.get(index, UNTAGGED)[0] in BUFFERS:
            self._tags[index] = ROLES.index(role), self._owners.get(owner, 0)

    def see_results(self, call: tuple[Any, Any, Any, Any], op: int, now_ns: int) -> None:
        """As `see_all` with the operator, its arguments and result; what its kernel holds beside them is noted too."""
        scratch = self.kernels(*call) if self.kernels else ()
        self.see_all(call[-1], op, now_ns)
        for group in scratch:
            self.took(group, op, now_ns)

    def see_all(self, out: Any, op: int, now_ns: int) -> None:
        """Notes every storage in the result of operator number `op`, which ended at `now_ns`."""
        if isinstance(out, torch.Tensor):
            if out.device == self._device:
                for storage in _storages(out):
                    self.see(storage, op, out.dtype, now_ns)
        elif isinstance(out, (tuple, list)):
            for part in out:
                self.see_all(part, op, now_ns)

    def see(self, storage: torch.UntypedStorage, op: int, dtype: torch.dtype | None = None, now_ns: int = 0) -> int:
        """Number of the storage, born now if it is new or resized; NONE for a storage without bytes."""
        key, n_bytes = storage._cdata, storage.nbytes()
        watched = self._live.get(key)
        if watched is not None:
            if watched.n_bytes == n_bytes:
                return watched.index
            self._died(watched)
        if not n_bytes:
            return NONE
        try:
            address = 0 if storage.device == META else storage.data_ptr()
        except RuntimeError:  # the zero of forward differentiation
            return NONE
        index = self.n_seen
        self.n_seen += 1
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self._births += (address, n_bytes, op, dtype, stream)
        self._turns += (index + 1, now_ns or time_ns())
        watched = self._live[key] = _Watched(storage, self._on_death)
        watched.index, watched.key, watched.n_bytes = index, key, n_bytes
        return index

    def took(self, temporaries: Iterable[int], op: int, now_ns: int) -> None:
        """Operator number `op` held memory of these bytes at the same time, and returned it."""
        first = self.n_seen
        for n_bytes in filter(None, temporaries):
            self._births += (0, n_bytes, op, None, 0)
            self.n_seen += 1
            self._turns += (self.n_seen, now_ns)
        for number in range(self.n_seen, first, -1):
            self._turns += (-number, now_ns)

    def of(self, values: object) -> list[int]:
        """Numbers of the watched storages behind the tensors in `values`, each once."""
        numbers: list[int] = []
        for tensor in tensors_of(values):
            for storage in _storages(tensor):
                watched = self._live.get(storage._cdata)
                if watched is not None and watched.index not in numbers:
                    numbers.append(watched.index)
        return numbers

    def _died(self, watched: _Watched) -> None:
        del self._live[watched.key]
        self._turns += (-watched.index - 1, time_ns())

    def name_since(self, first: int, role: Role, owner: int) -> None:
        """Gives `role` to the storages from number `first` on, which belong to block number `owner`."""
        self._tags.update(dict.fromkeys(range(first, self.n_seen), (ROLES.index(role), owner)))


class CallLog:
    """Forward calls of blocks in order of begin; a checkpoint keeps a call's inputs. Storages are numbers."""

    def __init__(self) -> None:
        self.block: list[int] = []
        self.line: list[int] = []
        self.first_ns: list[int] = []
        self.last_ns: list[int] = []
        self.inputs: list[Sequence[int]] = []
        self.outputs: list[Sequence[int]] = []

    def begin(self, block: int, storages: Sequence[int], now_ns: int, line: int) -> int:
        """Adds a call that begins now and returns its number."""
        self.block.append(block)
        self.line.append(line)
        self.first_ns.append(now_ns)
        self.last_ns.append(UNENDED)
        self.inputs.append(storages)
        self.outputs.append(())
        return len(self.block) - 1

    def end(self, call: int, storages: Sequence[int], now_ns: int) -> None:
        """Ends call number `call` now. A call without an end, after an error, lasts to the end of the step."""
        self.last_ns[call] = now_ns
        self.outputs[call] = storages

    def record(self, tick_ns: Ints, entry_of: Ints) -> Calls:
        """The calls on a timeline: tick i + 1 is at `tick_ns[i]`, and storage s has the entry `entry_of[s]`, or -1."""

        def entries_of(storages: Sequence[int]) -> list[int]:
            return [entry for entry in (int(entry_of[storage]) for storage in storages) if entry >= 0]

        inputs, outputs = ([entries_of(storages) for storages in side] for side in (self.inputs, self.outputs))
        return Calls(
            block=column(self.block),
            line=column(self.line),
            first_tick=column(np.searchsorted(tick_ns, np.asarray(self.first_ns), side="right").tolist()),
            end_tick=column(np.searchsorted(tick_ns, np.asarray(self.last_ns), side="right").tolist()),
            n_inputs=column(len(entries) for entries in inputs),
            n_outputs=column(len(entries) for entries in outputs),
            entries=column(entry for pair in zip(inputs, outputs) for entries in pair for entry in entries),
        )


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in `values`, in the order of torch.utils._pytree.tree_leaves, which takes ten times as long.

    Dataclasses, which tree_leaves does not enter, are entered too: attention layers return such intermediates.
    """
    kind = type(values)
    if isinstance(values, torch.Tensor):
        return [values]
    if kind is tuple or kind is list or kind is dict:
        tensors: list[torch.Tensor] = []
        for value in values.values() if kind is dict else values:
            tensors += (value,) if type(value) is torch.Tensor else tensors_of(value)
        return tensors
    if values is None or kind in (bool, int, float, str):
        return []
    is_data = is_dataclass(kind) and not issubclass(kind, Mapping)
    leaves = data_inside((values,)) if is_data else tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def tensors_in_memory() -> list[torch.Tensor]:
    """Every tensor with bytes that Python can reach; a compiler also keeps tensors without bytes."""
    return [tensor for tensor in instances_in_memory(torch.Tensor) if _has_bytes(tensor)]


def lies_on(value: object, device: torch.device) -> bool:
    """Whether `value` is a tensor with bytes on `device`."""
    return isinstance(value, torch.Tensor) and value.device == device and _has_bytes(value)


def _has_bytes(tensor: torch.Tensor) -> bool:
    try:
        if tensor.layout is not torch.strided:  # a sparse tensor has a storage in each of its parts
            return any(storage.device == tensor.device and storage.nbytes() > 0 for storage in storages(tensor))
        storage = tensor.untyped_storage()
        # Fake tensors are on "meta".
        return storage.device == tensor.device and storage.nbytes() > 0 and storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # fake, functional or half-built tensors
        return False


def _address(storage: torch.UntypedStorage) -> int:
    """The storage's address; 0 of a fake tensor, because torch warns of a question for the address."""
    return 0 if storage.device == META else storage.data_ptr()


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """As `bits.storages`, plus storages of tensors without data, whose bytes a prediction counts."""
    try:
        storage = tensor.untyped_storage()
        if type(tensor) not in PLAIN:
            _address(storage)
    except (NotImplementedError, RuntimeError):  # sparse; a wrapper such as a DTensor
        return storages(tensor) or [part.untyped_storage() for part in parts(tensor) if part.layout is torch.strided]
    return (storage,)
