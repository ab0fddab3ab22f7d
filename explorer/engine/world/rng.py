"""States of every random generator that a step may draw from: reading, restoring and seeding."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from explorer.engine.world import generators as objects
from explorer.engine.world.generators import image, imported_numpy, own_generators

TORCH_CPU = "torch cpu"
PYTHON = "python"
NUMPY = "numpy"


@dataclass(frozen=True)
class RngState:
    """States of all generators: torch's of each device, Python's, numpy's, and the generators of a model."""

    states: Mapping[str, Any]
    """By `torch cpu`, `torch cuda:0`, `python`, `numpy`, or the dotted path of a generator in the model."""
    generators: Mapping[str, Any]
    """Generators of the model, by dotted path."""

    @classmethod
    def capture(cls, model: nn.Module | None = None) -> RngState:
        """Reads the states without a draw. CUDA devices count once CUDA runs, numpy once it is imported."""
        generators = own_generators(model) if model is not None else {}
        states: dict[str, Any] = {TORCH_CPU: torch.get_rng_state(), PYTHON: random.getstate()}
        for index in _cuda_devices():
            states[f"torch cuda:{index}"] = torch.cuda.get_rng_state(index)
        if (numpy := imported_numpy()) is not None:
            states[NUMPY] = numpy.random.get_state()
        states.update((path, objects.get_state(generator)) for path, generator in generators.items())
        return cls(states, generators)

    def restore(self) -> None:
        """Restores every captured generator."""
        for name, state in self.states.items():
            if name in self.generators:
                objects.set_state(self.generators[name], state)
            else:
                set_state(name, state)

    def positions(self) -> dict[str, bytes]:
        """Comparable bytes of each generator's state."""
        return {name: image(state) for name, state in self.states.items()}


@dataclass(frozen=True)
class OutsideRng:
    """Generators that torch.utils.checkpoint does not stash: `python`, `numpy`, and generator objects."""

    names: tuple[str, ...] = ()
    own: tuple[Any, ...] = ()
    """Generators of the model: a deep copy of the model draws from copies of these."""
    shared: tuple[torch.Generator, ...] = ()
    """Generators outside the model: a deep copy of the model draws from the same objects."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideRng:
        return OutsideRng(self.names, copy.deepcopy(self.own, memo), self.shared)

    def read(self) -> tuple[Any, ...]:
        """The states of all generators, in order."""
        return (*map(get_state, self.names), *(objects.get_state(generator) for generator in (*self.own, *self.shared)))

    def write(self, states: tuple[Any, ...]) -> None:
        """Sets all generators to states from `read`."""
        for name, state in zip(self.names, states):
            set_state(name, state)
        for generator, state in zip((*self.own, *self.shared), states[len(self.names) :]):
            objects.set_state(generator, state)


def get_state(name: str) -> Any:
    """State of a generator of the process, named as in `RngState.states`; imports numpy if needed."""
    if name == TORCH_CPU:
        return torch.get_rng_state()
    if name == PYTHON:
        return random.getstate()
    if name == NUMPY:
        return importlib.import_module(NUMPY).random.get_state()
    return torch.cuda.get_rng_state(int(name.rpartition(":")[2]))


def set_state(name: str, state: Any) -> None:
    """Sets a generator of the process, named as in `RngState.states`."""
    if name == TORCH_CPU:
        torch.set_rng_state(state)
    elif name == PYTHON:
        random.setstate(state)
    elif name == NUMPY:
        importlib.import_module(NUMPY).random.set_state(state)
    else:
        torch.cuda.set_rng_state(state, int(name.rpartition(":")[2]))


def seed_everything(seed: int) -> None:
    """Seeds torch on every device, Python and numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := imported_numpy()) is not None:
        numpy.random.seed(seed % 2**32)


def _cuda_devices() -> range:
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
