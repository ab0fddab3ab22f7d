"""Random generators that a step may draw from: those of the process, and objects that a model holds.

A process has one generator of torch for each device, one of Python and one of numpy. torch.utils.checkpoint restores
only those of torch. Without an import of numpy no code can have drawn from numpy.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

TORCH_CPU = "torch cpu"
PYTHON = "python"
NUMPY = "numpy"


_COMMON = frozenset({OrderedDict, dict, set, tuple, bool, int, float, str, type(None)})
"""Types of nearly all attributes of a module, each looked at in every step."""


@dataclass(frozen=True)
class RngState:
    """States of all generators: torch's of each device, Python's, numpy's, and the generators of a model."""

    states: Mapping[str, object]
    """By `torch cpu`, `torch cuda:0`, `python`, `numpy`, or the dotted path of a generator in the model."""
    generators: Mapping[str, object]
    """Generators of the model, by dotted path."""

    @classmethod
    def capture(cls, model: nn.Module | None = None) -> RngState:
        """Reads the states without a draw. CUDA devices count once CUDA runs, numpy once it is imported."""
        generators = generators_of(model) if model is not None else {}
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        names = [TORCH_CPU, PYTHON, *(f"torch cuda:{index}" for index in cuda), *([NUMPY] if imported_numpy() else [])]
        states = {name: get_state(name) for name in names}
        states.update((path, get_state(generator)) for path, generator in generators.items())
        return cls(states, generators)

    def restore(self) -> None:
        """Restores every captured generator."""
        for name, state in self.states.items():
            set_state(self.generators.get(name, name), state)

    def positions(self) -> dict[str, bytes]:
        """Comparable bytes of each generator's state."""
        return {name: state_bytes(state) for name, state in self.states.items()}


@dataclass(frozen=True)
class OutsideRng:
    """Generators that torch.utils.checkpoint does not stash: `python`, `numpy`, and generator objects."""

    names: tuple[str, ...] = ()
    own: tuple[object, ...] = ()
    """Generators of the model: a deep copy of the model draws from copies of these."""
    shared: tuple[torch.Generator, ...] = ()
    """Generators outside the model: a deep copy of the model draws from the same objects."""

    def __deepcopy__(self, memo: dict[int, object]) -> OutsideRng:
        return OutsideRng(self.names, copy.deepcopy(self.own, memo), self.shared)

    def read(self) -> tuple[object, ...]:
        """The states of all generators, in order."""
        return tuple(map(get_state, (*self.names, *self.own, *self.shared)))

    def write(self, states: tuple[object, ...]) -> None:
        """Sets all generators to states from `read`."""
        for generator, state in zip((*self.names, *self.own, *self.shared), states):
            set_state(generator, state)


def get_state(generator: object) -> object:
    """State of a generator object, or of a generator of the process by its name in `RngState.states`."""
    generator = of_process(generator) if isinstance(generator, str) else generator
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(getattr(generator, "bit_generator", generator), "state", None)


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator, named as in `get_state`, to a state from `get_state`."""
    generator = of_process(generator) if isinstance(generator, str) else generator
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def of_process(name: str) -> Any:
    """The generator of the process with this name. Imports numpy if its generator is named."""
    if name in (PYTHON, NUMPY):
        return vars(random)["_inst"] if name == PYTHON else importlib.import_module("numpy.random.mtrand")._rand
    return torch.default_generator if name == TORCH_CPU else torch.cuda.default_generators[int(name.rpartition(":")[2])]


def seed_everything(seed: int) -> None:
    """Seeds torch on every device, Python and numpy."""
    random.seed(seed)
    seed_torch(seed)
    if (numpy := imported_numpy()) is not None:
        numpy.random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seeds torch on every device, as torch.manual_seed does.

    Without CUDA torch.manual_seed takes 0.6 to 2 ms: it formats a stack trace for a call that never comes.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def imported_numpy() -> ModuleType | None:
    """numpy if the process has imported it, else None."""
    module = sys.modules.get(NUMPY)
    return module if module is not None and hasattr(module, "random") else None


def is_generator(value: object) -> bool:
    """Whether `value` is a torch.Generator, random.Random, numpy Generator or RandomState, and not a process global."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom) and value is not vars(random)["_inst"]
    numpy = imported_numpy()
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return False
    return value is not numpy.random.mtrand._rand


def generators_of(model: nn.Module) -> dict[str, Any]:
    """Generators that modules hold as attributes, by the dotted path that a policy uses."""
    return {
        f"{fqn}.{name}".lstrip("."): value
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) not in _COMMON and is_generator(value)
    }


def get_position(generator: object) -> bytes:
    """Comparable bytes of a generator's state. Functorch is off: inside `torch.func` the state would be a wrapper."""
    with torch._C._DisableFuncTorch():  # type: ignore[attr-defined]
        return state_bytes(get_state(generator))


def generator_key(generator: torch.Generator) -> int:
    """A key of the generator, equal for all its Python objects: torch creates a new object at each access."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def state_bytes(state: object) -> bytes:
    """Comparable bytes of a generator's state."""
    return bytes(state.cpu().numpy().tobytes()) if isinstance(state, torch.Tensor) else repr(_as_lists(state)).encode()


def _as_lists(state: object) -> object:
    """The state with lists instead of numpy arrays, which repr would shorten."""
    if isinstance(state, Mapping):
        return {name: _as_lists(part) for name, part in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_as_lists, state))
    return state.tolist() if hasattr(state, "tolist") else state
