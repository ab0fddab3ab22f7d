"""FSDP2: blocks are recomputed before they are sharded."""

from __future__ import annotations

import pytest

from tests.plan.export.runs import (
    LAYERS,
    Chain,
    assert_same,
    chain_loss,
    file_of,
    module_of,
    ran_again,
    step,
    untouched,
)


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"early_stop": False}])
def test_fsdp2_recomputes_before_it_shards(options: dict[str, bool]) -> None:
    chosen = ("layers.1", "layers.4")
    module = module_of(file_of(*chosen, **options), "fsdp2")
    model = Chain()
    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, module.recompute)
    assert ran_again(before, calls, LAYERS) == set(chosen)
    assert_same(plain, gradients)
    sharded: list[tuple[str, bool]] = []
    module.fully_shard = lambda module, **sharding: sharded.append((type(module).__name__, sharding["wide"]))
    module.recompute_then_shard(model, wide=True)
    assert sharded == [("CheckpointWrapper", True)] * 2 + [("Chain", True)]
