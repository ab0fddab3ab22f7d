"""Changes that a forward leaves: in buffers and attributes of a module, in container arguments, in shared objects.

A checkpoint keeps container arguments (lists, dictionaries, caches) as they are, not as copies. The block may change a
container (a key/value cache), or other code may do so later (a dense block's list of features). The recompute then
finds other content. Cheap pictures of all objects, before and after, detect a change.

Blocks may also share an object that none is handed: one puts a skip connection in, a later one takes it out again.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.state.reachable import (
    OF_TORCH,
    PLAIN,
    SharedNames,
    attributes,
    cell_contents,
    data_inside,
    items,
    picture,
)
from explorer.engine.state.rng import is_generator
from explorer.engine.watch.forward import NoteTaker, Operator, StorageName, dense, dense_tensors
from explorer.record.graph import Trait

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Identify = Callable[[Tensor], object]
"""A name of a storage that no later storage at the same address gets."""


class ContainerInputs:
    """The container arguments of one call, with a picture of their content at its begin."""

    def __init__(self, args: tuple[object, ...], kwargs: Mapping[str, object], identify: Identify) -> None:
        values = (*args, *kwargs.values())
        self._containers = [value for value in values if not isinstance(value, (Tensor, nn.Module, *PLAIN))]
        self._picture = picture(self._containers)
        self._identify = identify
        self._inside: set[object] = set()
        self.traits: set[Trait] = set(_form(args, kwargs))
        self.read: set[object] | None = set() if self._containers else None
        """Names of the storages that the block's operators read; None if all arguments are tensors and numbers."""
        self._note_inside()

    def look(self) -> None:
        """Compares the arguments with the picture: at the end of the call, and at the end of the model's forward."""
        self._note_inside()
        if self._containers and picture(self._containers) != self._picture:
            self.traits.add("keeps_cache" if self._inside & (self.read or set()) else "fills_inputs")

    def _note_inside(self) -> None:
        self._inside.update(self._identify(tensor) for tensor in tensors_in(self._containers))


def _form(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[Trait]:
    """Traits of the arguments that matter to reentrant checkpointing, which sees only arguments that are tensors."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        yield "inputs_need_no_grad"
    if any(tensor.requires_grad for tensor in tensors_in(value for value in values if not isinstance(value, Tensor))):
        yield "nested_inputs"
    if kwargs:
        yield "keyword_inputs"


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Every tensor inside lists, dictionaries and plain objects; modules are not entered."""
    return (value for value in data_inside(values) if isinstance(value, Tensor))


StatePictures = dict[tuple[str, str], tuple[str, object]]
"""(fqn, name) -> (kind, picture) of every buffer and plain attribute; a moved value has a different picture."""


def state_pictures(model: nn.Module) -> StatePictures:
    """Pictures of the state that the modules hold; a policy has an option for running statistics."""
    pictures: StatePictures = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                pictures[fqn, name] = ("buffer", picture(buffer, versions=True))
        for name, value in vars(module).items():
            if name not in OF_TORCH and not isinstance(value, nn.Module) and not is_generator(value):
                pictures[fqn, name] = ("attribute", picture(value, objects=False, versions=True))
    return pictures


def moved_names(model: nn.Module, before: StatePictures) -> dict[str, set[str]]:
    """Names of the attributes and buffers that differ from `before`, by module."""
    after = state_pictures(model)
    moved: dict[str, set[str]] = defaultdict(set)
    for fqn, name in before.keys() | after.keys():
        if before.get((fqn, name)) != after.get((fqn, name)):
            moved[fqn].add(name)
    return moved


def moved_traits(model: nn.Module, before: StatePictures, *, statistics: bool = False) -> dict[str, set[Trait]]:
    """Traits of the modules whose own buffers or attributes differ from `before`.

    Running statistics of torch's norms count only if `statistics`, because a forward must move them.
    """
    after = state_pictures(model)
    modules = dict(model.named_modules())
    moved: dict[str, set[Trait]] = defaultdict(set)
    for key in before.keys() | after.keys():
        if before.get(key) == after.get(key):
            continue
        fqn, name = key
        kind = (after.get(key) or before[key])[0]
        norm = isinstance(modules[fqn], _NormBase) and modules[fqn].track_running_stats
        if statistics or not (norm and name in RUNNING_STATISTICS):
            moved[fqn].add("moves_buffers" if kind == "buffer" else "moves_attributes")
            value = modules[fqn]._buffers.get(name, vars(modules[fqn]).get(name))
            if any(tensor.grad_fn is not None for tensor in tensors_in([value])):
                moved[fqn].add("keeps_graph")
    return moved


Slot = tuple[int, object]
"""A place for a tensor: address of a container or object, and the key, index or attribute."""


class _SharingCall(NamedTuple):
    at_begin: dict[Slot, StorageName]
    read: set[StorageName]
    """Storages that operators in the call have read."""


class SharedTensors(NoteTaker):
    """Finds blocks that remove or replace a tensor in an object that several modules share.

    A block that removes the tensor and uses it cannot run again: it finds the slot empty (torchgpipe's `stash` and
    `pop`). A block that replaces the tensor runs again with its own result. Only what the block uses counts: a block
    that empties a list of losses computes the same without them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.traits: dict[str, set[Trait]] = defaultdict(set)
        self._objects = _shared_objects(model)
        self._calls: list[_SharingCall] = []
        self._stored_by: dict[StorageName, set[str]] = defaultdict(set)

    def entered(self, fqn: str, args: object, kwargs: object) -> None:
        if self._objects:
            self._calls.append(_SharingCall(self._slots(), set()))

    def reads(self, op: Operator) -> None:
        if any(call.at_begin for call in self._calls):
            names = set(map(self.watch.name, op.read))
            for call in self._calls:
                call.read.update(names)

    def left(self, fqn: str, output: object) -> None:
        if not self._calls:
            return
        before, read = self._calls.pop()
        after = self._slots()
        stored = set(after.values())
        for name in stored - set(before.values()):
            self._stored_by[name].add(fqn)
        read.update(map(self.watch.name, dense_tensors(output)))
        emptied = _n_tensors(before) - _n_tensors(after)
        for slot, name in before.items():
            if name not in read or name in stored:
                continue
            if slot in after and slot[0] not in emptied:
                self.traits[fqn].add("moves_attributes")
            else:
                self.traits[fqn].add("takes_stored")
                for block in self._stored_by[name]:
                    self.traits[block].add("stores_tensors")

    def _slots(self) -> dict[Slot, StorageName]:
        return {
            (id(holder), key): self.watch.name(value)
            for holder in data_inside(self._objects)
            for key, value in _items(holder)
            if isinstance(value, Tensor) and dense(value)
        }


def _n_tensors(slots: Iterable[Slot]) -> Counter[int]:
    """Number of tensors in each object."""
    return Counter(holder for holder, _ in slots)


_MOST_SHARED = 1000
"""Items in a shared object that is walked at every call of a block."""
_STORES = (dict, list, deque, defaultdict, threading.local)
"""Types of objects outside of modules in which blocks leave tensors."""


def _shared_objects(model: nn.Module) -> list[object]:
    """Containers and plain objects that attributes and closures of two modules lead to, and empty ones elsewhere.

    Elsewhere are files, classes and closures of a file's functions. A container that is full before the forward is a
    table there, not a place for tensors of the forward.
    """
    n_modules: dict[int, int] = defaultdict(int)
    objects: dict[int, object] = {}
    for module in model.modules():
        roots = [value for name, value in vars(module).items() if name not in OF_TORCH]
        roots += [content for root in roots for content in cell_contents(root)]
        for value in data_inside(roots):
            if not isinstance(value, (Tensor, nn.Module, type, *PLAIN)):
                objects[id(value)] = value
                n_modules[id(value)] += 1
    for shared in SharedNames(model):
        for value in (shared.value, *cell_contents(shared.value)):
            if type(value) in _STORES and not (items(value) or attributes(value)):
                objects[id(value)], n_modules[id(value)] = value, 2
    several = [value for address, value in objects.items() if n_modules[address] > 1]
    return [value for value in several if sum(len(items(part) or ()) for part in data_inside([value])) <= _MOST_SHARED]


def _items(holder: object) -> Iterable[tuple[object, object]]:
    if isinstance(holder, Mapping):
        return list(holder.items())
    if isinstance(holder, (Tensor, nn.Module, type, ModuleType)):
        return ()
    inside = items(holder)
    return attributes(holder).items() if inside is None else enumerate(inside)
