"""Generator objects that a model holds, of torch, Python and numpy: reading and restoring their states.

torch.utils.checkpoint does not restore these generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

_DEEPEST = 5


def is_generator(value: Any) -> bool:
    """Whether `value` is a torch.Generator, random.Random, numpy Generator or RandomState, and not a process global."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom) and value is not getattr(random, "_inst", None)
    numpy = imported_numpy()
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return False
    return value is not numpy.random.mtrand._rand


def own_generators(model: nn.Module) -> dict[str, Any]:
    """Generators that modules hold as attributes, by the dotted path that a policy uses."""
    return {
        f"{fqn}.{name}".lstrip("."): value
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if is_generator(value)
    }


def generators_in_reach(model: nn.Module) -> list[Any]:
    """Generators that modules hold, directly or inside lists, dictionaries and plain objects; each once."""
    by_id = {id(g): g for module in model.modules() for value in vars(module).values() for g in _within(value, ())}
    return list(by_id.values())


def _within(value: Any, above: tuple[int, ...]) -> Iterator[Any]:
    if is_generator(value):
        yield value
    elif len(above) < _DEEPEST and id(value) not in above and not isinstance(value, (torch.Tensor, nn.Module, type)):
        if isinstance(value, Mapping):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        else:
            parts = vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()
        for part in list(parts):
            yield from _within(part, (*above, id(value)))


def get_state(generator: Any) -> Any:
    """The state of a generator, for `set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to a state from `get_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def get_position(generator: Any) -> bytes:
    """Comparable bytes of a generator's state. Functorch is off: inside `torch.func` the state would be a wrapper."""
    with torch._C._DisableFuncTorch():  # type: ignore[attr-defined]
        return image(get_state(generator))


def identity(generator: torch.Generator) -> int:
    """A key of the generator, equal for all its Python objects: torch creates a new object at each access."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def image(state: Any) -> bytes:
    """Comparable bytes of a generator's state."""
    return bytes(state.cpu().numpy().tobytes()) if isinstance(state, torch.Tensor) else repr(_plain(state)).encode()


def _plain(state: Any) -> Any:
    """The state with lists instead of numpy arrays, which repr would shorten."""
    if isinstance(state, Mapping):
        return {name: _plain(part) for name, part in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_plain, state))
    return state.tolist() if hasattr(state, "tolist") else state


def imported_numpy() -> ModuleType | None:
    """numpy if the process has imported it, else None: without an import no code can have drawn from numpy."""
    module = sys.modules.get("numpy")
    return module if module is not None and hasattr(module, "random") else None
