"""On models of every shape: a preset proposes nothing that a hazard calls an error, nothing useless, and leaves no
repeated or large block out; what it proposes runs, and gives the bare gradients bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from explorer.engine.bench.step import forward_backward, prepare
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import InvalidPolicy
from explorer.plan.catalogue import catalogue, recorded_sample
from explorer.plan.hazards.hazards import hazards
from explorer.plan.names import is_within
from explorer.plan.policy.counted import in_error
from explorer.plan.policy.presets import PRESETS, preset
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec
from tests.engine import preset_nets, tiny_nets

SAMPLES = [ModelRef(target=sample.target, size=next(iter(sample.sizes))) for sample in catalogue()]
NETS = [preset_nets.ref(name) for name in ("encoder_decoder", "unet", "frozen_body", "operators", "dense")]
NETS += [preset_nets.ref("dense", n_blocks=1), preset_nets.ref("encoder_decoder", drop=0.5)]
NETS += [preset_nets.ref(name) for name in ("lstm_pair", "gan", "stemmed", "listed", "cached", "handing")]
NETS += [preset_nets.ref("listed", drop=0.5), preset_nets.ref("gan", spectral=True)]
NETS += [preset_nets.ref("lstm_pair", by_cell=True)]
PLAIN = [preset_nets.ref(name) for name in ("mnist", "linear", "one_parameter")]
PLAIN += [preset_nets.ref("frozen_body", n_trained=0)]
"""Nothing to choose."""


GRAPHS: dict[str, ModelGraph] = {}
"""By the text of the model's reference: each net is described once."""


def graph_of(ref: ModelRef) -> ModelGraph:
    if (key := repr(ref)) not in GRAPHS:
        sample = recorded_sample(ref)  # test_samples.py holds its graph against the model
        GRAPHS[key] = describe(ref) if sample is None or sample.run.graph is None else sample.run.graph
    return GRAPHS[key]


def named(ref: ModelRef) -> str:
    return f"{ref.target.rpartition('/')[2]} {ref.arguments or ''}"


def left_out(graph: ModelGraph, policy: Policy) -> set[str]:
    """Blocks with modules inside or tensors of their own that save as much as the smallest unit does, are neither in a
    unit nor around one, and that no hazard forbids."""
    least = max(min(sum(graph.by_fqn[fqn].saved_bytes for fqn in unit.blocks) for unit in policy.units), 1)
    large = {
        block.fqn for block in graph.blocks
        if block.saved_bytes >= least and block.fqn not in graph.saves_nothing
        and (graph.children[block.fqn] or block.kind in ("LSTM", "LSTMCell", "GRU"))
        and not any(is_within(block.fqn, fqn) or is_within(fqn, block.fqn) for fqn in policy.blocks)
    }  # fmt: skip
    return large - {fqn for unit in in_error(graph, [(fqn,) for fqn in large]) for fqn in unit}


@pytest.mark.parametrize("ref", [*SAMPLES, *NETS], ids=named)
def test_no_error_nothing_left_out(ref: ModelRef) -> None:
    graph = graph_of(ref)
    for name in PRESETS:
        foreseen = hazards(graph, preset(name, graph))
        assert all(hazard.severity == "note" or "attributes" in hazard.rule for hazard in foreseen)
    every = preset("all", graph)
    assert left_out(graph, every) == set()
    assert graph.saves_nothing.isdisjoint(every.blocks)
    lone = [unit.blocks[0] for unit in every.units if len(unit.blocks) == 1 and not graph.children[unit.blocks[0]]]
    assert all(graph.by_fqn[fqn].saved_bytes > graph.by_fqn[fqn].output_bytes for fqn in lone)


def gradients(ref: ModelRef, policy: Policy) -> tuple[dict[str, Tensor | None], int]:
    """And the bytes that saved tensors hold after forward, each storage once."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    spec = RunSpec(model=ref, policy=policy, optimizer="none")
    with preserve_global_state(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainee = prepare(spec, load(ref))
        n_bytes: list[int] = []
        forward_backward(trainee, lambda phase: n_bytes.append(sum(held.values())))
    return {name: parameter.grad for name, parameter in trainee.model.named_parameters()}, n_bytes[1]


@pytest.mark.parametrize("ref", PLAIN, ids=named)
def test_a_preset_with_nothing_to_choose_says_so(ref: ModelRef) -> None:
    graph = graph_of(ref)
    assert preset("keep-all", graph) == KEEP_ALL
    for name in PRESETS.keys() - {"keep-all"}:
        with pytest.raises(InvalidPolicy, match="No block of"):
            preset(name, graph)


@pytest.mark.parametrize("ref", NETS, ids=named)
def test_what_is_proposed_runs_saves_memory_and_changes_no_gradient(ref: ModelRef) -> None:
    graph = graph_of(ref)
    bare, kept_bytes = gradients(ref, KEEP_ALL)
    for policy in {preset(name, graph) for name in PRESETS if name != "keep-products"}:
        recomputed, n_bytes = gradients(ref, policy)
        assert recomputed.keys() == bare.keys()
        wrong = [fqn for fqn, gradient in bare.items() if not _same(gradient, recomputed[fqn])]
        assert not wrong and (n_bytes < kept_bytes or not policy.units or ref.arguments.get("drop"))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_what_each_of_them_recomputes() -> None:
    def blocks(name: str, **arguments: object) -> tuple[str, ...]:
        return preset("all", graph_of(preset_nets.ref(name, **arguments))).blocks

    layers = tuple(f"encoder.{i}" for i in range(4))
    assert blocks("encoder_decoder") == (*layers, "decoder")
    assert blocks("encoder_decoder", drop=0.5) == (*layers, "decoder")
    assert blocks("unet") == ("down.0", "down.1", "middle.0", "middle.1", "up.0", "up.1")
    assert blocks("dense") == ("0", "2")
    assert blocks("dense", n_blocks=1) == ("0",)
    assert blocks("lstm_pair") == blocks("lstm_pair", by_cell=True) == ("encoder", "decoder")
    assert blocks("gan") == (*(f"generator.{i}" for i in range(4)), *(f"critic.{i}" for i in range(4)))
    assert blocks("gan", spectral=True) == tuple(f"generator.{i}" for i in range(4))
    assert blocks("stemmed") == ("conv", "norm", "relu", "layers.0", "layers.1", "last", "last_norm", "last_act")
    assert blocks("listed") == tuple(f"body.layers.{i}.1" for i in range(5))
    assert blocks("cached") == tuple(f"body.layers.{i}.mlp" for i in range(3))
    assert blocks("handing") == tuple(f"layers.{i}" for i in range(5))


def test_the_sample_unet_with_its_middle() -> None:
    assert "middle" in preset("all", graph_of(ModelRef(target="sample_models/unet.py", size="small"))).blocks


@pytest.mark.parametrize("seed", range(4))
def test_a_branch_that_the_observed_forward_left_out_is_recomputed_all_the_same(seed: int) -> None:
    graph = describe(tiny_nets.ref("dropped_branches"), seed=seed)
    assert graph.saves_nothing.intersection(map(str, range(8))), "no block was left out: another seed"
    assert preset("all", graph).blocks == tuple(map(str, range(8)))
