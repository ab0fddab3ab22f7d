"""Presets by name: which blocks, on which kind of container."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import integers

from explorer.errors import InvalidPolicy
from explorer.plan.presets import PRESETS, counted_blocks, is_preset, preset
from explorer.record.graph import Block, ModelGraph
from explorer.record.policy import KEEP_ALL, Policy
from tests.graphs import gpt, unet


def sequential(n_layers: int) -> ModelGraph:
    """The same layers in a Sequential instead of a ModuleList."""
    graph = gpt(n_layers)
    return msgspec.structs.replace(graph, blocks=tuple(_renamed(block) for block in graph.blocks))


def _renamed(block: Block) -> Block:
    return msgspec.structs.replace(block, kind="Sequential") if block.fqn == "blocks" else block


@given(n_layers=integers(2, 40), k=integers(1, 50))
def test_every_k_takes_the_first_and_each_k_th_after_it(n_layers: int, k: int) -> None:
    policy = preset(f"every-{k}", gpt(n_layers))
    assert policy == Policy.recompute([f"blocks.{i}" for i in range(n_layers) if i % k == 0])


@given(n_layers=integers(2, 40))
def test_keep_all_all_and_except_last(n_layers: int) -> None:
    graph = gpt(n_layers)
    layers = [f"blocks.{i}" for i in range(n_layers)]
    assert preset("keep-all", graph) == KEEP_ALL
    assert preset("all", graph) == Policy.recompute(layers) == preset("every-1", graph)
    assert preset("except-last", graph) == Policy.recompute(layers[:-1])


@given(n_layers=integers(2, 200))
def test_sqrt_makes_segments_that_cover_a_sequential_in_order(n_layers: int) -> None:
    policy = preset("sqrt", sequential(n_layers))
    assert policy.blocks == tuple(f"blocks.{i}" for i in range(n_layers))
    assert len(policy.units) == round(math.sqrt(n_layers))
    lengths = [len(unit.blocks) for unit in policy.units]
    assert max(lengths) - min(lengths) <= 1


@given(n_layers=integers(2, 200))
def test_sqrt_keeps_sqrt_n_spread_blocks_where_none_can_be_joined(n_layers: int) -> None:
    policy = preset("sqrt", gpt(n_layers))
    kept = [i for i in range(n_layers) if f"blocks.{i}" not in policy.blocks]
    assert len(kept) == round(math.sqrt(n_layers)) and kept[-1] == n_layers - 1
    gaps = [b - a for a, b in zip([-1, *kept], kept)]
    assert max(gaps) - min(gaps) <= 1
    assert all(len(unit.blocks) == 1 for unit in policy.units)


def test_blocks_that_never_ran_are_not_counted() -> None:
    graph = gpt(4)
    idle = msgspec.structs.replace(graph.by_fqn["blocks.2"], n_calls=0)
    graph = msgspec.structs.replace(graph, blocks=tuple(idle if b.fqn == idle.fqn else b for b in graph.blocks))
    assert counted_blocks(graph) == ("blocks.0", "blocks.1", "blocks.3")
    assert preset("all", graph).blocks == ("blocks.0", "blocks.1", "blocks.3")


def test_a_model_without_repeats_counts_its_spine() -> None:
    graph = unet(3)
    assert preset("all", graph).blocks == graph.spine
    assert preset("sqrt", ModelGraph(model=graph.model, blocks=(), edges=())) == KEEP_ALL


@pytest.mark.parametrize("name", [*PRESETS, "every-3", "every-17"])
def test_every_name_works_on_every_shape(name: str) -> None:
    assert is_preset(name)
    for graph in (gpt(12), sequential(9), unet(4), gpt(2)):
        policy = preset(name, graph)
        assert set(policy.blocks) <= set(graph.by_fqn)


@pytest.mark.parametrize("name", ["every-0", "every-", "every-x", "al", "", "policy.yaml", "every-K"])
def test_unknown_names_are_refused_with_the_nearest(name: str) -> None:
    assert not is_preset(name)
    with pytest.raises(InvalidPolicy, match=f"no preset {name}"):
        preset(name, gpt(3))


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(InvalidPolicy, match="Did you mean sqrt"):
        preset("sqr", gpt(3))
