"""Nets of lessons: weights by the seed alone, masks that are remembered, blocks by name."""

from __future__ import annotations

from functools import partial

import torch

from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, Recurrent, Residual, block_names, blocks_of, chain


def test_a_chain_is_the_same_for_the_same_seed_and_named() -> None:
    first, again, other = (chain(Residual, 3, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first[0].first.weight, other[0].first.weight)
    assert block_names(first) == ["block0", "block1", "block2"]
    assert blocks_of(first, Residual) == list(first) and blocks_of(first, Normed) == []


def test_dropout_remembers_each_mask_and_scales_what_it_keeps() -> None:
    (block,) = chain(partial(Dropped, 0.5), 1)
    x = torch.ones(BATCH, WIDTH)
    kept = block.dropout(x)
    (mask,) = block.dropout.masks
    assert torch.equal(kept, mask * 2.0) and 0 < mask.float().mean() < 1
    block.eval()
    assert torch.equal(block.dropout(x), x) and len(block.dropout.masks) == 1


def test_a_recurrent_net_uses_one_cell_for_every_step() -> None:
    net = chain(Recurrent, 1)[0]
    sequence = torch.randn(2, 3, WIDTH)
    state = torch.zeros(2, WIDTH)
    for t in range(3):
        state = net.cell(state, sequence[:, t])
    assert torch.equal(net(sequence), state)
