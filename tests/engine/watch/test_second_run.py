"""What watches for second runs is seen by nobody; what it finds stands in test_hazards_shown.py, shown by real runs."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from explorer.engine.model.load import load
from explorer.engine.watch.observe import Observation
from explorer.engine.watch.second_run import SecondRun
from explorer.engine.world.generators import generators_in_reach, own_generators
from tests.engine import rerun_nets, tiny_nets
from tests.engine.graphs import graph_of


def test_the_other_observer_sees_the_operators_of_the_model_alone() -> None:
    loaded = load(tiny_nets.ref("gpt"))

    def seen(*, watched: bool) -> tuple[int, list[tuple[int, int]]]:
        observation = Observation(loaded.model)
        torch.manual_seed(1)
        if watched:
            with SecondRun(loaded.model), observation:
                loaded.output()
        else:
            with observation:
                loaded.output()
        return observation.flow.now, [(each.signature, each.flops) for each in observation.seen.values()]

    assert seen(watched=True) == seen(watched=False)


def test_nothing_of_it_stays_on_the_model() -> None:
    loaded = load(rerun_nets.ref("drawing", source="python"))
    before = {fqn: dict(vars(module)) for fqn, module in loaded.model.named_modules()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in loaded.model.modules()]
    with SecondRun(loaded.model):
        loaded.output()
    assert {fqn: dict(vars(module)) for fqn, module in loaded.model.named_modules()} == before
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loaded.model.modules()] == hooks
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks


def test_generators_are_found_inside_lists_and_objects_but_not_the_ones_of_the_process() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"deep": random.Random(2)}
            self.me = self

    net = nn.Linear(1, 1)
    net.own, net.listed, net.held = torch.Generator(), [random.Random(1)], Holder()  # type: ignore[assignment]
    net.shared, net.system = random._inst, random.SystemRandom()  # type: ignore[assignment, attr-defined]
    assert own_generators(net) == {"own": net.own}
    assert generators_in_reach(net) == [net.own, net.listed[0], net.held.inner["deep"]]  # type: ignore[index, union-attr]


class Sequel(nn.Module):
    """Draws once from Python's generator and seeds it afterwards: no seed of its own, and yet it ends in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_a_block_that_goes_on_from_where_it_was_is_named_though_another_one_seeds() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.draws, self.seeds = Sequel(), rerun_nets.Seeded("python")

        def forward(self, x: Tensor) -> Tensor:
            return self.seeds(self.draws(x))

    found = graph_of(Both(), torch.ones(2, rerun_nets.WIDTH))
    assert "python_rng" in found.by_fqn["draws"].traits
    assert "python_rng" not in found.by_fqn["seeds"].traits
