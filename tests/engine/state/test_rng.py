"""Every generator is found, read without being moved, and put back."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from torch import nn

from explorer.engine.state.rng import OutsideRng, RngState, generators_of, get_state, seed_everything, set_state


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Noise())


def draws(net: nn.Module) -> dict[str, float]:
    return {
        "torch cpu": torch.rand(1).item(),
        "python": random.random(),
        "numpy": numpy.random.rand(),
        "1.generator": torch.rand(1, generator=net[1].generator).item(),  # type: ignore[index]
    }


def test_restore_repeats_every_draw() -> None:
    net = model()
    state = RngState.capture(net)
    first = draws(net)
    assert draws(net) != first
    state.restore()
    assert draws(net) == first


def test_reading_moves_nothing() -> None:
    net = model()
    seed_everything(5)
    before = RngState.capture(net).positions()
    assert RngState.capture(net).positions() == before


@pytest.mark.parametrize("source", ["torch cpu", "python", "numpy", "1.generator"])
def test_positions_tell_which_generator_moved(source: str) -> None:
    net = model()
    before = RngState.capture(net).positions()
    kept = RngState.capture(net)
    draws(net)
    moved = RngState.capture(net).states[source]
    kept.restore()
    if source == "1.generator":
        net[1].generator.set_state(moved)  # type: ignore[index]
    else:
        set_state(source, moved)
    after = RngState.capture(net).positions()
    assert {name for name in before if before[name] != after[name]} == {source}


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**63 - 1])
def test_a_seed_decides_everything(seed: int) -> None:
    net = model()
    seed_everything(seed)
    first = RngState.capture().positions()
    draws(net)
    seed_everything(seed)
    assert RngState.capture().positions() == first


def test_generators_of_a_model_by_dotted_path() -> None:
    net = model()
    assert generators_of(net) == {"1.generator": net[1].generator}  # type: ignore[index]
    assert list(generators_of(net[1])) == ["generator"]  # type: ignore[index]


def test_outside_generators_go_back_and_return() -> None:
    own, shared = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    outside = OutsideRng(("python", "numpy"), (own,), (shared,))
    at_forward = outside.read()

    def drawn() -> tuple[object, ...]:
        return random.random(), numpy.random.rand(), torch.rand(1, generator=own), torch.rand(1, generator=shared)

    first = drawn()
    later = outside.read()
    outside.write(at_forward)
    assert drawn() == first
    outside.write(later)
    assert drawn() != first


def test_a_copy_takes_own_generators_along_and_shares_the_rest() -> None:
    outside = OutsideRng(("python",), (torch.Generator(),), (torch.Generator(),))
    twin = copy.deepcopy(outside)
    assert twin.own[0] is not outside.own[0]
    assert twin.shared[0] is outside.shared[0]


def test_names_of_the_process() -> None:
    for name in ("torch cpu", "python", "numpy"):
        state = get_state(name)
        first = draws(model())[name]
        assert draws(model())[name] != first
        set_state(name, state)
        assert draws(model())[name] == first
