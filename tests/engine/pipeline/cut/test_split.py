"""A tape in parts is the model: parts carry what later ones read, and make again what is made of nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from explorer.engine.pipeline.cut.keyed_rng import KeyedRng
from explorer.engine.pipeline.cut.split import StageModule, cut_tape
from explorer.engine.pipeline.cut.tape import record
from tests.engine.pipeline.cut.taped import taped
from tests.engine.pipeline.pipeline_nets import LANGUAGE, TRANSPOSED, UNET


@pytest.mark.parametrize(("net", "chain"), [("language", LANGUAGE), ("unet", UNET), ("transposed", TRANSPOSED)])
def test_a_tape_played_whole_is_the_model(net: str, chain: tuple[str, ...]) -> None:
    loaded, tape = taped(net, chain)
    (part,) = cut_tape(tape, (chain,))
    module = StageModule(loaded.model, part, KeyedRng(0, chain, enabled=False))
    torch.manual_seed(7)
    expected = loaded.output(copy.deepcopy(loaded.model))
    torch.manual_seed(7)
    (played,) = module(loaded.inputs)
    assert torch.equal(played, expected)


def test_boundaries_carry_what_later_stages_read_and_no_more() -> None:
    _, tape = taped("unet", UNET)
    parts = cut_tape(tape, (UNET[:1], UNET[1:2], UNET[2:]))
    assert [str(meta) for meta in parts[1].metas_in] == ["down 8x4x8x8 float32", "max_pool2d 8x4x4x4 float32"]
    assert parts[1].receives[0] == parts[2].receives[0]  # the skip passes through stage 1
    assert parts[0].sends == parts[1].receives
    assert parts[1].sends == parts[2].receives


def test_values_made_of_nothing_are_made_again_instead_of_sent() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(4).cumsum(0)
            mask[0] = 0.5
            for block in self.blocks:
                x = block(x) * mask
            return x

    model, x = Masked(), torch.randn(2, 4)
    chain = ("blocks.0", "blocks.1")
    parts = cut_tape(record(copy.deepcopy(model), x, chain), (chain[:1], chain[1:]))
    assert len(parts[1].receives) == 1
    rng = KeyedRng(0, chain, enabled=False)
    (sent,) = StageModule(model, parts[0], rng)(x)
    (out,) = StageModule(model, parts[1], rng)(sent)
    assert torch.equal(out, model(x))


def test_a_value_made_of_nothing_may_be_read() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1])
            return self.block(x) * 2 if bool((positions < 9).all()) else self.block(x)

    model, x = Masked(), torch.randn(2, 3)
    (part,) = cut_tape(record(copy.deepcopy(model), x, ("block",)), (("block",),))
    (out,) = StageModule(model, part, KeyedRng(0, ("block",), enabled=False))(x)
    assert torch.equal(out, model(x))
