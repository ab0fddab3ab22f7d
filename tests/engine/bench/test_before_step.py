"""What lies in memory before a step: every tensor once, under the first thing that it is, in bytes of storages."""

from __future__ import annotations

import torch
from torch import nn

from explorer.engine.bench.memory import optimizer_tensors, owner, storage_bytes, tensors_before_step

CPU = torch.device("cpu")


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_tensor_has_a_role_and_the_block_that_holds_it() -> None:
    model, optimizer = trained()
    model[0].seen = torch.zeros(5)
    batch = torch.ones(2, 3)
    known = [(one.role, one.owner, one.tensor) for one in tensors_before_step(model, optimizer, [batch, "text"])]
    roles = {role: [fqn for one, fqn, _ in known if one == role] for role in {role for role, _, _ in known}}
    assert roles == {
        "parameter": ["0", "0", "1", "1"],
        "gradient": ["0", "0", "1", "1"],
        "buffer": ["1", "1", "1", "0"],
        "optimizer state": ["0", "0", "1", "1"],
        "input": [""],
    }
    assert any(tensor is model[0].seen for _, _, tensor in known) and known[-1][2] is batch


def test_without_an_optimizer_there_is_no_state() -> None:
    model, _ = trained()
    assert optimizer_tensors(model, None) == []


def test_a_storage_counts_once_and_only_on_its_device() -> None:
    model = nn.Linear(3, 4)
    model.again = model.weight
    model.view = model.weight.detach()[:2]
    known = tensors_before_step(model, None, [])
    assert storage_bytes(known, CPU) == (3 * 4 + 4) * 4
    assert storage_bytes(known, torch.device("meta")) == 0


def test_the_owner_is_the_block_above_the_name() -> None:
    assert (owner("blocks.0.weight"), owner("weight")) == ("blocks.0", "")
