"""Generators of a model, wherever it keeps them; those of the process are nobody's own."""

from __future__ import annotations

import random

import torch
from torch import nn

from explorer.engine.state.rng import generators_of, reachable_generators


def test_generators_are_found_inside_lists_and_objects_but_not_the_ones_of_the_process() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"deep": random.Random(2)}
            self.me = self

    net = nn.Linear(1, 1)
    net.own, net.listed, net.held = torch.Generator(), [random.Random(1)], Holder()  # type: ignore[assignment]
    net.shared, net.system = random._inst, random.SystemRandom()  # type: ignore[assignment, attr-defined]
    assert generators_of(net) == {"own": net.own}
    assert reachable_generators(net) == [net.own, net.listed[0], net.held.inner["deep"]]  # type: ignore[index, union-attr]
