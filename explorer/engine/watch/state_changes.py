"""Changes that a forward leaves: in buffers and attributes of a module, and in container arguments of a block.

A checkpoint keeps container arguments (lists, dictionaries, caches) as they are, not as copies. The block may change a
container (a key/value cache), or other code may do so later (a dense block's list of features). The recompute then
finds other content. Cheap pictures of all objects, before and after, detect a change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.state.reachable import PLAIN, data_inside, picture
from explorer.engine.state.rng import is_generator
from explorer.record.graph import Trait

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OF_TORCH = frozenset(vars(nn.Module()))

Identify = Callable[[Tensor], Any]
"""A name of a storage that no later storage at the same address gets."""


class ContainerInputs:
    """The container arguments of one call, with a picture of their content at its begin."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], identify: Identify) -> None:
        values = (*args, *kwargs.values())
        self._containers = [value for value in values if not isinstance(value, (Tensor, nn.Module, *PLAIN))]
        self._picture = picture(self._containers)
        self._identify = identify
        self._inside: set[Any] = set()
        self.traits: set[Trait] = set(_form(args, kwargs))
        self.read: set[Any] | None = set() if self._containers else None
        """Names of the storages that the block's operators read; None if all arguments are tensors and numbers."""
        self._note_inside()

    def look(self) -> None:
        """Compares the arguments with the picture: at the end of the call, and at the end of the model's forward."""
        self._note_inside()
        if self._containers and picture(self._containers) != self._picture:
            self.traits.add("keeps_cache" if self._inside & (self.read or set()) else "fills_inputs")

    def _note_inside(self) -> None:
        self._inside.update(self._identify(tensor) for tensor in tensors_in(self._containers))


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Trait]:
    """Traits of the arguments that matter to reentrant checkpointing, which sees only arguments that are tensors."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        yield "inputs_need_no_grad"
    if any(tensor.requires_grad for tensor in tensors_in(value for value in values if not isinstance(value, Tensor))):
        yield "nested_inputs"
    if kwargs:
        yield "keyword_inputs"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor inside lists, dictionaries and plain objects; modules are not entered."""
    return (value for value in data_inside(values) if isinstance(value, Tensor))


StatePictures = dict[tuple[str, str], tuple[str, Any]]
"""(fqn, name) -> (kind, picture) of every buffer and plain attribute; a moved value has a different picture."""


def state_pictures(model: nn.Module) -> StatePictures:
    """Pictures of the state that the modules hold; a policy has an option for running statistics."""
    pictures: StatePictures = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                pictures[fqn, name] = ("buffer", picture(buffer, versions=True))
        for name, value in vars(module).items():
            if name not in _OF_TORCH and not isinstance(value, nn.Module) and not is_generator(value):
                pictures[fqn, name] = ("attribute", picture(value, objects=False, versions=True))
    return pictures


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
    return moved
