"""A parameter has one name, whatever its model is wrapped in; a model's own part called `module` keeps its."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from explorer.engine.model.plain_names import inside, plain_buffers, plain_modules, plain_parameters


class Ddp(nn.Module):
    """Holds what it wraps as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Compiled(nn.Module):
    """Holds what it wraps as torch.compile does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Own(nn.Module):
    """Has a part called `module`, and a tensor beside it: no wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_wrappers_do_not_show_in_a_name() -> None:
    plain = net()
    wrapped = Ddp(nn.Sequential(checkpoint_wrapper(plain[0]), Compiled(plain[1])))
    for names in (plain_parameters, plain_buffers):
        assert {name: id(value) for name, value in names(wrapped).items()} == {
            name: id(value) for name, value in names(plain).items()
        }
    assert [fqn for fqn, _ in plain_modules(wrapped)] == ["", "0", "1"]


def test_a_part_called_module_is_no_wrapping() -> None:
    assert inside(Ddp(net())) == "module" and inside(Own()) == "" and inside(net()) == ""
    assert set(plain_parameters(Own())) == {"scale", "module.weight", "module.bias"}


def test_a_shared_module_stands_under_all_its_names_and_a_circle_ends() -> None:
    model = net()
    model.again = model[0]
    assert {"0.weight", "again.weight"} <= set(plain_parameters(model))
    model[0].itself = model[0]
    assert [fqn for fqn, _ in plain_modules(model)] == ["", "0", "1", "again"]
