"""A model steps several times from where it was found, and is left with its very own tensors, lists and modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.seen = [1]
    model(torch.ones(3, 2)).sum().backward()
    return model, torch.arange(6.0).reshape(3, 2)


def step(model: nn.Sequential, batch: torch.Tensor) -> None:
    model(batch.to(model[0].weight.dtype)).square().sum().backward()
    model.seen.append(2)
    model.new = 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def test_each_run_starts_where_it_was_found_and_all_is_left_as_it_was() -> None:
    model, batch = model_and_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors, seen = [id(p) for p in (*model.parameters(), *model.buffers())], model.seen
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    position = torch.get_rng_state()
    after = []
    with ModelSnapshot(model, list(model.modules())) as found_model:
        for _ in range(2):
            found_model.restore()
            assert all(p.grad is None for p in model.parameters()) and model.seen == [1] and model.seen is not seen
            step(model, batch)
            after.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(after[0][name], after[1][name]) for name in before)
    assert not torch.equal(after[0]["0.weight"], before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p) for p in (*model.parameters(), *model.buffers())] == tensors
    assert all(p.grad is grad and torch.equal(p.grad, was) for p, (grad, was) in zip(model.parameters(), gradients))
    assert model.seen is seen and seen == [1] and not hasattr(model, "new")
    assert torch.equal(torch.get_rng_state(), position)


def test_a_run_in_float64_leaves_the_types_that_were_found() -> None:
    model, batch = model_and_batch()
    with ModelSnapshot(model, list(model.modules())) as found_model:
        found_model.restore(torch.float64)
        step(model, batch)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model[1].num_batches_tracked.dtype is torch.int64
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_memory_that_parameters_share_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat parameters; two storages that were freed have one address, and each is freed again."""
    flat = torch.arange(400.0)
    model = nn.Module()
    model.views = nn.ParameterList([nn.Parameter(part) for part in flat.split(4)])
    model.freed = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
    for parameter in model.freed:
        parameter.untyped_storage().resize_(0)
    copied: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda one: copied.append(one.nbytes()) or clone(one))
    with ModelSnapshot(model, [model]):
        assert sorted(copied) == [0, 0, flat.nbytes]
        flat.zero_()
        for parameter in model.freed:
            parameter.untyped_storage().resize_(12)
    assert torch.equal(torch.cat(list(model.views)), torch.arange(400.0))
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.freed)


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    model, _ = model_and_batch()
    before = model[0].weight.clone()
    with pytest.raises(ValueError), ModelSnapshot(model, list(model.modules())) as found_model:
        found_model.restore()
        model[0].weight.data.zero_()
        raise ValueError
    assert torch.equal(model[0].weight, before)


def test_an_optimizer_steps_with_a_copy_of_what_it_remembers() -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    held = optimizer.state[model[0].weight]
    moment = held["exp_avg"].clone()
    found_optimizer = OptimizerSnapshot(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    found_optimizer.restore()
    now = optimizer.state[model[0].weight]
    assert now is not held and torch.equal(now["exp_avg"], moment) and optimizer.param_groups[0]["lr"] == 0.1
    found_optimizer.close()
    assert optimizer.state[model[0].weight] is held and torch.equal(held["exp_avg"], moment)


def test_moments_take_the_type_of_a_wider_parameter() -> None:
    model, _ = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    model.zero_grad()
    model[0].weight.data = model[0].weight.data.double()
    OptimizerSnapshot(optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float64
    assert optimizer.state[model[0].weight]["step"].dtype is torch.float32  # one number: Adam's own type
