"""Which blocks together are the model, which of them repeat, and where it may be cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.model.describe import describe
from explorer.record.graph import ModelRef
from tests.engine.walk_net import ROW, W, Walk, graph


def test_the_spine_and_its_cuts() -> None:
    found = graph(Walk())
    assert found.chain == ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [(cut.after, cut.before) for cut in found.cuts] == list(zip(found.chain, found.chain[1:]))
    assert {(cut.n_bytes, cut.n_tensors, cut.refusal) for cut in found.cuts} == {(ROW, 1, None)}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(W, W)
        self.other = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(torch.tanh(self.other(self.same(x))))


def test_a_block_on_both_sides_refuses_the_cut() -> None:
    found = graph(Twice())
    assert found.by_fqn["same"].n_calls == 2
    assert [(cut.after, cut.before, bool(cut.refusal)) for cut in found.cuts] == [("same", "other", True)]


def test_skips_cross_a_cut_as_further_tensors() -> None:
    found = describe(
        ModelRef(target="sample_models/unet.py", arguments={"width": 4, "side": 8, "batch": 1, "depth": 2})
    )
    assert [cut.n_tensors for cut in found.cuts] == [2, 3, 3, 2, 1]
    assert all(cut.refusal is None for cut in found.cuts)


def test_experts_beside_each_other_are_no_spine() -> None:
    small = {"n_layers": 2, "width": 8, "length": 4, "batch": 2, "vocabulary": 8}
    found = describe(ModelRef(target="sample_models/moe.py", arguments=small))
    assert found.chain == ("embedding", "blocks.0", "blocks.1", "norm", "head")
