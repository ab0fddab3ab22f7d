"""What can be cut and what cannot, and why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from explorer.engine.model.load import load
from explorer.engine.pipeline.cut.build import build
from explorer.engine.pipeline.cut.keyed_rng import KeyedRng
from explorer.engine.pipeline.cut.split import StageModule, cut_tape
from explorer.engine.pipeline.cut.tape import record
from explorer.errors import InvalidPlan
from explorer.record.graph import ModelRef
from tests.engine.pipeline.pipeline_nets import LANGUAGE, TRANSPOSED, UNET
from tests.engine.pipeline.plans import NETS, spec


def taped(net: str, chain: tuple[str, ...]):  # noqa: ANN201
    loaded = load(ModelRef(target=f"{NETS}:{net}"))
    return loaded, record(copy.deepcopy(loaded.model), loaded.inputs, chain)


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


def test_blocks_are_steps_and_what_lies_between_is_functions() -> None:
    _, tape = taped("language", LANGUAGE)
    names = [step.name for step in tape.steps if isinstance(step.target, str)]
    assert names == ["tokens", "dropout", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert {path for step in tape.steps for path in step.paths} == {"positions"}


def test_recording_leaves_no_hooks() -> None:
    loaded = load(ModelRef(target=f"{NETS}:language"))
    record(loaded.model, loaded.inputs, LANGUAGE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


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


@pytest.mark.parametrize(
    ("net", "stages", "words"),
    [
        ("deciding", (("first",), ("second",)), "reads a tensor's value (__bool__) after first"),
        ("repeating", (("first",), ("second",)), "first of stage 0 runs after stage 1 has begun"),
        ("language", (("tokens", "blocks.0"), ("blocks.9",)), "'blocks.9' is not in the model"),
        ("language", (("tokens", "blocks.0"), ("blocks.0",)), "'blocks.0' is named twice"),
        ("language", (("tokens", "blocks.0"), ("blocks.0.wide",)), "'blocks.0.wide' lies inside 'blocks.0'"),
    ],
)
def test_an_unsupported_split_says_why(net: str, stages: tuple[tuple[str, ...], ...], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        build(spec(net, ("x",), 1, stages=stages, n_microbatches=2))
    assert words in str(caught.value)


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


def test_an_object_in_which_tensors_may_hide_is_refused() -> None:
    class Cache:
        pass

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Cell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, cache=Cache())

    class Cell(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x * 2

    with pytest.raises(InvalidPlan, match="hold a Cache"):
        record(Cached(), torch.ones(2), ("block",))


def test_keys_differ_by_block_and_microbatch_and_seed() -> None:
    drawn = set()
    for seed in (0, 1):
        rng = KeyedRng(seed, ("a", "b"))
        for block in ("a", "b"):
            for microbatch in (0, 1):
                rng.enter(block, microbatch)
                drawn.add(torch.rand(()).item())
    assert len(drawn) == 8
