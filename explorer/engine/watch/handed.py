"""What a block is handed besides plain tensors: lists, dictionaries, caches. A checkpoint keeps the very objects.

They may grow or change, by the block (a key/value cache) or once it has run (a dense block's list of features): then
the second run finds another content. A cheap picture of what can be reached from them tells.
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
"""Names a storage so that another one at the same address later has another name."""


class Handed:
    """The arguments of one call, as they were when it began."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], identify: Identify) -> None:
        values = (*args, *kwargs.values())
        self._things = [value for value in values if not isinstance(value, _PLAIN)]
        self._picture = _picture(self._things)
        self._identify = identify
        self._inside: set[Any] = set()
        self.traits: set[Trait] = set(_form(args, kwargs))
        self.read: set[Any] | None = {*()} if self._things else None
        """Names of the storages that operators of the block read; None: it was handed tensors and numbers alone."""
        self._note_inside()

    def look(self) -> None:
        """At the end of the call, and once more at the end of the model's forward."""
        self._note_inside()
        if self._things and _picture(self._things) != self._picture:
            self.traits.add("keeps_cache" if self._inside & (self.read or set()) else "fills_inputs")

    def _note_inside(self) -> None:
        self._inside.update(self._identify(tensor) for tensor in tensors_in(self._things))


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Trait]:
    """How tensors are handed over, which only reentrant checkpointing minds: it sees arguments that are tensors."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        yield "inputs_need_no_grad"
    if any(t.requires_grad for value in values if not isinstance(value, Tensor) for t in tensors_in((value,))):
        yield "nested_inputs"
    if kwargs:
        yield "keyword_inputs"


def tensors_in(things: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in reach of lists, dictionaries and plain objects; modules are not entered."""
    return _tensors(things, set())


def _tensors(things: Iterable[Any], met: set[int], depth: int = 0) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif depth < _DEEPEST and id(thing) not in met and not isinstance(thing, _PLAIN):
            met.add(id(thing))
            yield from _tensors(_parts(thing), met, depth + 1)


def _picture(value: Any, met: tuple[int, ...] = (), *, versions: bool = False) -> Any:
    """Another one where something in reach was added, removed or replaced; inside a cache also where it was written."""
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
