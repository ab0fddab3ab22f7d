"""Parameters without memory: shapes and types as asked, all else real, and torch as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from explorer.engine.device.without_data import cast_buffers, explain_data_dependence, is_without_data, without_data
from explorer.errors import ModelFailed


def test_a_model_of_a_tebibyte_is_built_and_run() -> None:
    with without_data():
        model = nn.Sequential(*(nn.Linear(2**14, 2**14, bias=False) for _ in range(2**10)))
        result = model(torch.ones(1, 2**14))
        assert is_without_data()
    assert sum(parameter.nbytes for parameter in model.parameters()) == 2**40
    assert is_fake(model[0].weight) and is_fake(result) and result.shape == (1, 2**14)
    assert not is_without_data() and not is_fake(nn.Linear(2, 2).weight)


def test_types_are_those_asked_for_and_buffers_stay_real() -> None:
    def half(dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype.is_floating_point else dtype

    with without_data(half):
        norm = nn.BatchNorm1d(4)
        cast_buffers(norm, half)
    assert norm.weight.dtype == norm.running_mean.dtype == torch.bfloat16
    assert norm.num_batches_tracked.dtype == torch.int64 and not is_fake(norm.running_mean)


def test_torch_is_as_it_was_after_a_model_that_raises() -> None:
    registered, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    with pytest.raises(ValueError), without_data():
        nn.init.trunc_normal_(nn.Linear(2, 2).weight)
        raise ValueError
    assert nn.Module.register_parameter is registered and nn.init._no_grad_trunc_normal_ is truncated


def test_a_decision_by_data_is_refused_in_a_sentence() -> None:
    with pytest.raises(ModelFailed, match=r"net\.py cannot be foreseen without its data"), without_data():
        layer = nn.Linear(2, 2)
        with explain_data_dependence("net.py"):
            layer(torch.ones(1, 2)).sum().item()
