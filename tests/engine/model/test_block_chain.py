"""Which blocks together are the model, which of them repeat, and where it may be cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.model.describe import describe
from explorer.record.graph import ModelRef
from tests.engine.walk_net import ROW, W, Walk, graph


def test_the_spine_and_its_cuts() -> None:
    described = graph(Walk())
    assert described.chain == ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [(cut.after, cut.before) for cut in described.cuts] == list(zip(described.chain, described.chain[1:]))
    assert {(cut.n_bytes, cut.n_tensors, cut.refusal) for cut in described.cuts} == {(ROW, 1, None)}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(W, W)
        self.other = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(torch.tanh(self.other(self.same(x))))


def test_a_block_on_both_sides_refuses_the_cut() -> None:
    described = graph(Twice())
    assert described.by_fqn["same"].n_calls == 2
    assert [(cut.after, cut.before, bool(cut.refusal)) for cut in described.cuts] == [("same", "other", True)]


def test_skips_cross_a_cut_as_further_tensors() -> None:
    described = describe(
        ModelRef(target="sample_models/unet.py", arguments={"width": 4, "side": 8, "batch": 1, "depth": 2})
    )
    assert [cut.n_tensors for cut in described.cuts] == [2, 3, 3, 2, 1]
    assert all(cut.refusal is None for cut in described.cuts)


def test_experts_beside_each_other_are_no_spine() -> None:
    small = {"n_layers": 2, "width": 8, "length": 4, "batch": 2, "vocabulary": 8}
    described = describe(ModelRef(target="sample_models/moe.py", arguments=small))
    assert described.chain == ("embedding", "blocks.0", "blocks.1", "norm", "head")
