"""Container arguments of a block: lists, dictionaries, caches. A checkpoint keeps these objects, not copies.

The block may change a container (a key/value cache), or other code may change it later (a dense block's list of
features). The recompute then finds other content. A cheap picture of all objects inside detects the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from explorer.record.graph import Trait

_PLAIN = (Tensor, nn.Module, type(None), bool, int, float, complex, str, bytes)
_DEEPEST = 6

Identify = Callable[[Tensor], Any]
"""A name of a storage that no later storage at the same address gets."""


class Handed:
    """The arguments of one call, with a picture of their content at its begin."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], identify: Identify) -> None:
        values = (*args, *kwargs.values())
        self._things = [value for value in values if not isinstance(value, _PLAIN)]
        self._picture = _picture(self._things)
        self._identify = identify
        self._inside: set[Any] = set()
        self.traits: set[Trait] = set(_form(args, kwargs))
        self.read: set[Any] | None = {*()} if self._things else None
        """Names of the storages that the block's operators read; None if all arguments are tensors and numbers."""
        self._note_inside()

    def look(self) -> None:
        """Compares the arguments with the picture: at the end of the call, and at the end of the model's forward."""
        self._note_inside()
        if self._things and _picture(self._things) != self._picture:
            self.traits.add("keeps_cache" if self._inside & (self.read or set()) else "fills_inputs")

    def _note_inside(self) -> None:
        self._inside.update(self._identify(tensor) for tensor in tensors_in(self._things))


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Trait]:
    """Traits of the arguments that matter to reentrant checkpointing, which sees only arguments that are tensors."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        yield "inputs_need_no_grad"
    if any(t.requires_grad for value in values if not isinstance(value, Tensor) for t in tensors_in((value,))):
        yield "nested_inputs"
    if kwargs:
        yield "keyword_inputs"


def tensors_in(things: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor inside lists, dictionaries and plain objects; modules are not entered."""
    return _tensors(things, set())


def _tensors(things: Iterable[Any], met: set[int], depth: int = 0) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif depth < _DEEPEST and id(thing) not in met and not isinstance(thing, _PLAIN):
            met.add(id(thing))
            yield from _tensors(_parts(thing), met, depth + 1)


def _picture(value: Any, met: tuple[int, ...] = (), *, versions: bool = False) -> Any:
    """A value that changes if an object inside was added, removed or replaced, and in a cache also if written to."""
    if isinstance(value, Tensor):
        return (id(value), value._version) if versions else id(value)
    if isinstance(value, _PLAIN) and not isinstance(value, nn.Module):
        return value
    if id(value) in met or len(met) > _DEEPEST:
        return None
    inside = not isinstance(value, (list, tuple, deque, set, Mapping))
    parts = tuple(_picture(part, (*met, id(value)), versions=versions or inside) for part in _parts(value))
    return (type(value), id(value) if inside else 0, parts)


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return tuple(value)
    if isinstance(value, nn.Module):
        return ()
    return tuple(vars(value).values()) if hasattr(value, "__dict__") else ()
