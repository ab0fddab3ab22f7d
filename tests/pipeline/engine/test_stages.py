"""A forward as a tape, cut into stages and segments: what can be cut, what cannot, and why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.model.loaded import call
from explorer.errors import InvalidPlan
from explorer.pipeline.engine.build import build
from explorer.pipeline.engine.microbatches import KeyedRng
from explorer.pipeline.engine.stages import StageModule, cut_tape
from explorer.pipeline.engine.tape import record
from explorer.pipeline.plan.cuts import stages_by
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy, Unit
from tests.pipeline.engine.pipeline_nets import CHAIN, LANGUAGE, SCALING, TRANSPOSED, UNET, Of
from tests.pipeline.engine.pipeline_runs import FILE, ran, spec, taped


def test_recording_leaves_no_hooks() -> None:
    loaded = load(ModelRef(target=f"{FILE}:language"))
    record(loaded.model, loaded.inputs, LANGUAGE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


@pytest.mark.parametrize(("net", "stages", "words"), [
    ("deciding", (("first",), ("second",)), "reads a tensor's value (__bool__) after first"),
    ("repeating", (("first",), ("second",)), "first of stage 0 runs after stage 1 has begun"),
    ("language", (("",),), "there is nothing to cut into stages"),
    ("language", (("tokens", "blocks.0"), ("blocks.9",)), "'blocks.9' is not in the model"),
    ("language", (("tokens", "blocks.0"), ("blocks.0",)), "'blocks.0' is named twice"),
    ("language", (("tokens", "blocks.0"), ("blocks.0.wide",)), "'blocks.0.wide' lies inside 'blocks.0'"),
])  # fmt: skip
def test_an_unsupported_split_says_why(net: str, stages: tuple[tuple[str, ...], ...], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        build(spec(net, ("x",), 1, stages=stages, n_microbatches=2))
    assert words in str(caught.value)


def test_an_object_in_which_tensors_may_hide_is_refused() -> None:
    class Cache:
        pass

    net = Of(lambda net, x: net.block(x, cache=Cache()), block=Of(lambda net, x, cache: x * 2))
    with pytest.raises(InvalidPlan, match="hold a Cache"):
        record(net, torch.ones(2), ("block",))


def test_a_tensor_that_leaves_its_block_by_a_list_is_refused() -> None:
    def leak(net: Any, x: torch.Tensor) -> torch.Tensor:
        leaked.append(net.linear(x))
        return x

    leaked: list[torch.Tensor] = []
    net = Of(lambda net, x: net.block(x) + leaked[-1], block=Of(leak, linear=nn.Linear(2, 2)))
    with pytest.raises(InvalidPlan, match="after block that no step returned"):
        record(net, torch.ones(2), ("block",))


@pytest.mark.parametrize(("net", "chain"), [("language", LANGUAGE), ("unet", UNET), ("transposed", TRANSPOSED)])
def test_a_tape_played_whole_is_the_model(net: str, chain: tuple[str, ...]) -> None:
    loaded, tape = taped(net, chain)
    (part,) = cut_tape(tape, (chain,))
    module = StageModule(loaded.model, part, KeyedRng(0, chain, enabled=False))
    torch.manual_seed(7)
    expected = call(copy.deepcopy(loaded.model), loaded.inputs)
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
    """Buffers and constants between blocks are read where they are."""

    def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4).cumsum(0)
        mask[0] = 0.5
        for block in net.blocks:
            x = block(x) * mask + net.shift + constant
        return x

    constant, x = torch.randn(4), torch.randn(2, 4)
    model = Of(masked, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    model.register_buffer("shift", torch.randn(4))
    chain = ("blocks.0", "blocks.1")
    parts = cut_tape(record(copy.deepcopy(model), x, chain), (chain[:1], chain[1:]))
    assert len(parts[1].receives) == 1
    rng = KeyedRng(0, chain, enabled=False)
    first, second = (StageModule(model, part, rng) for part in parts)
    (out,) = second(*first(x))
    assert torch.equal(out, model(x))
    assert [list(stage.buffers()) for stage in (first, second)] == [[model.shift]] * 2, "each rank holds it"


def test_a_value_made_of_nothing_may_be_read() -> None:
    def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        return net.block(x) * 2 if bool((positions < 9).all()) else net.block(x)

    model, x = Of(masked, block=nn.Linear(3, 3)), torch.randn(2, 3)
    (part,) = cut_tape(record(copy.deepcopy(model), x, ("block",)), (("block",),))
    (out,) = StageModule(model, part, KeyedRng(0, ("block",), enabled=False))(x)
    assert torch.equal(out, model(x))


def test_a_batch_size_written_into_the_model_is_a_sentence() -> None:
    with pytest.raises(InvalidPlan, match="raised RuntimeError on one of 2 microbatches: shape .* is invalid") as told:
        build(spec("fixed", ("first", "second"), 2, n_microbatches=2))
    assert "written into the model" in (told.value.hint or "")
    assert len(build(spec("fixed", ("first", "second"), 2, n_microbatches=1)).parts) == 2


def test_too_many_stages_say_why_there_are_no_more_places() -> None:
    graph = describe(ModelRef(target=f"{FILE}:repeating"))
    with pytest.raises(InvalidPlan, match=r"2 stages are asked, and .* can be cut into 1 at most: .*again"):
        stages_by("by-parameters", graph, 2)


PAIRS = Policy.recompute([("layers.0", "layers.1"), ("layers.3", "layers.4")])
STAGES = (CHAIN[:3], CHAIN[3:])


@pytest.mark.parametrize(("net", "blocks", "stages", "checkpoint"), [
    ("chain", CHAIN, STAGES, "always"),
    ("chain", CHAIN, STAGES, "except_last"),
    ("language", LANGUAGE, (LANGUAGE[:3], LANGUAGE[3:]), "always"),
    ("scaling", SCALING, (SCALING[:3], SCALING[3:]), "except_last"),
])  # fmt: skip
def test_a_segment_is_one_checkpoint_of_its_stage_and_moves_no_bit(
    net: str, blocks: tuple[str, ...], stages: tuple[tuple[str, ...], ...], checkpoint: str
) -> None:
    """Of a Sequential, and of a list whose blocks the model calls one by one."""
    policy = PAIRS if net == "chain" else Policy.recompute([("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")])
    plan = spec(net, blocks, 2, policy, stages=stages, checkpoint=checkpoint, schedule="1F1B")
    run = ran(plan)
    assert run.failure is None
    assert [s.name for s in run.gradients if not (s.recompute.bitwise and s.splitting.bitwise)] == []
    n_again = 4 if checkpoint == "always" else 3
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls == {fqn: (4, n_again if fqn in policy.blocks else 0) for fqn in blocks}


def test_a_cut_through_a_segment_of_a_list_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"blocks.1\+blocks.2 is cut.*Cut between"):
        build(spec("scaling", SCALING, 2, Policy.recompute([("blocks.1", "blocks.2")])))


def test_a_segment_saves_more_than_its_blocks_alone() -> None:
    """Only its input is kept, so it is not the blocks that are checkpointed one by one."""
    alone = Policy.recompute(PAIRS.blocks)
    runs = [ran(spec("chain", CHAIN, 2, policy, stages=STAGES, arguments={"batch": 512})) for policy in (alone, PAIRS)]
    held = []
    for memory in (run.memory[0] for run in runs):
        action = memory.actions.index("0F3")
        held.append([n_bytes for n_bytes, index in zip(memory.held_bytes, memory.action) if index == action][-1])
    assert held[1] < held[0]


@pytest.mark.parametrize(("policy", "words"), [
    (Policy.recompute([("layers.2", "layers.3")]), r"layers.2\+layers.3 is cut"),
    (Policy.recompute(["layers"]), "layers holds 6 blocks of the stages"),
    (Policy(units=(Unit(blocks=("",)),)), "the model holds 7 blocks"),
])  # fmt: skip
def test_what_does_not_fit_the_stages_is_refused(policy: Policy, words: str) -> None:
    with pytest.raises(InvalidPlan, match=words):
        build(spec("chain", CHAIN, 2, policy, stages=STAGES))


def test_units_inside_a_block_are_carried_out() -> None:
    run = ran(spec("language", LANGUAGE, 2, Policy.recompute(["blocks.1.wide"])))
    assert {block.fqn: block.n_recompute for block in run.blocks}["blocks.1"] == 4
    assert all(s.splitting.bitwise for s in run.gradients)
