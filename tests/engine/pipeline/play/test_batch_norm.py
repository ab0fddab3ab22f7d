"""Running statistics move once a batch, by mean and variance of the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from explorer.engine.pipeline.play.batch_norm import deferred_batch_norm
from explorer.engine.pipeline.run import run_pipeline
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import Policy
from tests.engine.pipeline.pipeline_nets import UNET
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import assert_split_is_exact


def test_deferred_batch_norm_moves_once_and_lands_near_the_whole_batch() -> None:
    run = run_pipeline(spec("unet", UNET, 3, deferred_batch_norm=True))
    assert_split_is_exact(run)
    for shares in run.buffers:
        if shares.name.startswith("down"):
            assert (shares.microbatching.relative_norm or 0.0) < 1e-5, shares.name
            if shares.name.endswith("num_batches_tracked"):
                assert shares.microbatching.bitwise


def moved(model: nn.Module, parts: list[torch.Tensor], *, enabled: bool) -> list[torch.Tensor]:
    with deferred_batch_norm(model, enabled=enabled):
        for part in parts:
            model(part).sum().backward()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return [value.clone() for value in model.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_move_them_as_the_whole_batch_does(momentum: float | None) -> None:
    x = torch.randn(8, 3, 5)
    norm = nn.BatchNorm1d(3, momentum=momentum)
    whole = moved(copy.deepcopy(norm), [x], enabled=False)
    deferred = moved(copy.deepcopy(norm), list(x.split(2)), enabled=True)
    each = moved(copy.deepcopy(norm), list(x.split(2)), enabled=False)
    for one, other in zip(whole, deferred, strict=True):
        torch.testing.assert_close(one, other)
    assert [int(n[-1]) for n in (whole, deferred, each)] == [1, 1, 4]


def test_what_runs_again_is_gathered_once() -> None:
    x = torch.randn(8, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    kept = moved(copy.deepcopy(model), list(x.split(2)), enabled=True)
    with apply_policy(model, Policy.recompute(["1"])):
        assert all(map(torch.equal, moved(model, list(x.split(2)), enabled=True), kept))
