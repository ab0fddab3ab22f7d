"""Every name and pattern means a policy on every model, each rung recomputes more, and clicks change units."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import frozensets, integers

from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.errors import InvalidPolicy
from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy.block_names import differences, expanded, joined, matching, policy_after, unknown_blocks
from explorer.plan.policy.presets import PRESETS, is_preset, ladder, preset
from explorer.record import KEEP_ALL, ModelGraph, Policy, Unit
from tests import graphs
from tests.engine.tiny_nets import ref
from tests.graphs import MIB, block, changed, gpt, graph_of, unet


def sequential(n_layers: int) -> ModelGraph:
    """The same layers in a Sequential instead of a ModuleList."""
    return changed(gpt(n_layers), blocks={"kind": "Sequential", "n_calls": 1})


@settings(max_examples=25, deadline=None)
@given(n_layers=integers(2, 40), k=integers(1, 50))
def test_every_k_takes_the_first_and_each_k_th_after_it(n_layers: int, k: int) -> None:
    policy = preset(f"every-{k}", gpt(n_layers))
    assert policy == Policy.recompute([f"blocks.{i}" for i in range(n_layers) if i % k == 0])


@settings(max_examples=25, deadline=None)
@given(n_layers=integers(2, 40))
def test_keep_all_all_and_except_last(n_layers: int) -> None:
    graph = gpt(n_layers)
    layers = [f"blocks.{i}" for i in range(n_layers)]
    assert preset("keep-all", graph) == KEEP_ALL
    assert preset("all", graph) == Policy.recompute(layers) == preset("every-1", graph)
    assert preset("except-last", graph) == Policy.recompute(layers[:-1])


def test_keep_products_takes_the_units_of_all_and_what_each_of_them_multiplies() -> None:
    products = {"op_flops": {"aten.mm.default": 1}}
    graph = changed(gpt(4), blocks__0=products, blocks__2=products)
    policy = preset("keep-products", graph)
    assert [unit.blocks for unit in policy.units] == [unit.blocks for unit in preset("all", graph).units]
    assert [unit.save_ops for unit in policy.units] == [("aten.mm.default",), (), ("aten.mm.default",), ()]


@settings(max_examples=25, deadline=None)
@given(n_layers=integers(2, 200))
def test_sqrt_makes_segments_that_cover_a_sequential_in_order(n_layers: int) -> None:
    policy = preset("sqrt", sequential(n_layers))
    assert policy.blocks == tuple(f"blocks.{i}" for i in range(n_layers))
    assert len(policy.units) == round(math.sqrt(n_layers))
    lengths = [len(unit.blocks) for unit in policy.units]
    assert max(lengths) - min(lengths) <= 1
    assert policy == preset("sqrt", in_turn(n_layers)), "layers of a list that hand on are joined as well"
    assert hazards(in_turn(n_layers), policy) == ()


def in_turn(n_layers: int, *, apart: int | None = None) -> ModelGraph:
    """Layers in a ModuleList of which each hands on to the next, but for the one numbered `apart`."""
    follows = {f"blocks.{i}": {"follows": f"blocks.{i - 1}" if i not in (0, apart) else ""} for i in range(n_layers)}
    return changed(gpt(n_layers), **{fqn.replace(".", "__"): fields for fqn, fields in follows.items()})


def test_no_segment_reaches_over_a_place_where_more_happens() -> None:
    graph = in_turn(12, apart=5)
    policy = preset("sqrt", graph)
    assert policy.blocks == tuple(f"blocks.{i}" for i in range(12))
    assert not any({"blocks.4", "blocks.5"} <= set(unit.blocks) for unit in policy.units)
    assert any(len(unit.blocks) > 1 for unit in policy.units) and hazards(graph, policy) == ()


def test_layers_of_which_some_may_be_left_out_are_not_joined() -> None:
    graph = in_turn(6)
    chain = tuple(fqn for fqn in graph.chain if fqn != "blocks.5")
    graph = msgspec.structs.replace(changed(graph, blocks__5={"n_calls": 0}), chain=chain)
    assert all(len(unit.blocks) == 1 for unit in preset("sqrt", graph).units)


@settings(max_examples=25, deadline=None)
@given(n_layers=integers(2, 200))
def test_sqrt_keeps_sqrt_n_spread_blocks_where_none_can_be_joined(n_layers: int) -> None:
    policy = preset("sqrt", gpt(n_layers))
    kept = [i for i in range(n_layers) if f"blocks.{i}" not in policy.blocks]
    assert len(kept) == round(math.sqrt(n_layers)) and kept[-1] == n_layers - 1
    gaps = [b - a for a, b in zip([-1, *kept], kept)]
    assert max(gaps) - min(gaps) <= 1
    assert all(len(unit.blocks) == 1 for unit in policy.units)


def test_a_layer_that_was_left_out_of_the_observed_forward_is_counted() -> None:
    graph = gpt(4)
    chain = tuple(fqn for fqn in graph.chain if fqn != "blocks.2")
    graph = msgspec.structs.replace(changed(graph, blocks__2={"n_calls": 0}), chain=chain)
    assert preset("all", graph).blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert hazards(graph, preset("all", graph)) == ()


def test_a_block_nearly_as_large_as_the_layers_is_counted_and_a_small_one_is_not() -> None:
    graph = gpt(3)
    blocks = [block for block in graph.blocks if block.fqn not in ("norm", "head")]
    decoder = [block("decoder", "Decoder", 15.0), block("decoder.one", "Linear"), block("tail", "Tail", 3.7)]
    chain = (*graph.chain[:-2], "decoder", "tail")
    large = msgspec.structs.replace(graph, blocks=(*blocks, *decoder, block("tail.one", "Linear")), chain=chain)
    assert preset("all", large).blocks == ("blocks.0", "blocks.1", "blocks.2", "decoder")
    quarter = changed(large, tail={"saved_bytes": 15 * MIB // 4})
    assert preset("all", quarter).blocks == ("blocks.0", "blocks.1", "blocks.2", "decoder", "tail")


LEAST = 15 * MIB // 4  # a quarter of what a layer of `gpt` saves


@pytest.mark.parametrize(("saved_bytes", "output_bytes", "is_joined"), [
    (LEAST + 1, 0, True),
    (LEAST, 0, False),
    (20 * MIB, 15 * MIB, True),
    (20 * MIB, 15 * MIB + 1, False),
])  # fmt: skip
def test_neighbours_outside_all_units_are_joined_if_they_free_a_quarter(
    saved_bytes: int, output_bytes: int, *, is_joined: bool
) -> None:
    last = block("last", "B", follows="first", saved_bytes=saved_bytes, output_bytes=output_bytes)
    graph = gpt(3)
    graph = msgspec.structs.replace(graph, blocks=(*graph.blocks, block("first", "A", 0.0), last))
    assert (("first", "last") in [unit.blocks for unit in preset("all", graph).units]) is is_joined


def cached(graph: ModelGraph, *names: str) -> ModelGraph:
    return changed(graph, **{name: {"traits": ("keeps_cache",)} for name in names})


def test_in_place_of_a_block_in_error_stand_those_in_it_or_the_one_around_it() -> None:
    graph, parts = changed(gpt(3), blocks={"n_calls": 1}), ("attention", "mlp")
    wrong = cached(graph, "blocks__0")
    assert preset("all", wrong).blocks == (*(f"blocks.0.{part}" for part in parts), "blocks.1", "blocks.2")
    wrong = cached(graph, *(f"blocks__{i}" for i in range(3)))
    assert preset("all", wrong).blocks == tuple(f"blocks.{i}.{part}" for i in range(3) for part in parts)
    wrong = cached(wrong, *(f"blocks__{i}__{part}" for i in range(3) for part in parts))
    assert preset("all", wrong).blocks == ("blocks",)
    wrong = cached(wrong, "blocks")
    with pytest.raises(InvalidPolicy, match="No block of sample_models/gpt.py is one to recompute by itself"):
        preset("all", wrong)
    assert preset("keep-all", wrong) == KEEP_ALL


def chain(n_operators: int, in_place: frozenset[int]) -> ModelGraph:
    """A Sequential of single operators, the model itself."""
    fqns = tuple(str(i) for i in range(n_operators))
    traits = [("changes_inputs",) if i in in_place else () for i in range(n_operators)]
    operators = [block(fqn, "Linear", 0.5, traits=of_one) for fqn, of_one in zip(fqns, traits)]
    root = block("", "Sequential", 0.5 * n_operators)
    return graph_of(root, *operators, chain=fqns)


@given(n_operators=integers(4, 60), in_place=frozensets(integers(0, 59)))
@example(n_operators=4, in_place=frozenset({0}))
def test_a_chain_of_operators_is_recomputed_in_segments_none_of_which_writes_into_its_input(
    n_operators: int, in_place: frozenset[int]
) -> None:
    graph = chain(n_operators, in_place)
    first = next((i for i in range(n_operators) if i not in in_place), n_operators)
    if first > n_operators - 2:
        with pytest.raises(InvalidPolicy, match="No block"):
            preset("all", graph)
        return
    policy = preset("all", graph)
    assert policy.blocks == tuple(str(i) for i in range(first, n_operators)), "nothing is left out"
    assert all(len(unit.blocks) > 1 for unit in policy.units) and len(policy.units) <= round(math.sqrt(n_operators))
    assert policy == preset("sqrt", graph)
    assert hazards(graph, policy) == ()


def test_lone_operators_in_a_forward_of_ones_own_are_not_worth_it() -> None:
    ops = chain(9, frozenset())
    flat = msgspec.structs.replace(ops, blocks=(block("", "UNet", 9.0), *ops.blocks[1:]))
    with pytest.raises(InvalidPolicy, match="each is a single operation.*Gather"):
        preset("all", flat)
    lstm = changed(flat, **{"3": {"saved_bytes": 8 * MIB}})
    assert preset("all", lstm).blocks == ("3",)


def test_a_model_without_repeats_counts_its_spine() -> None:
    graph = unet(3)
    levels = tuple(block(f"{fqn}.conv", "Conv2d", 0.1) for fqn in graph.chain)
    assert preset("all", msgspec.structs.replace(graph, blocks=(*graph.blocks, *levels))).blocks == graph.chain
    assert preset("sqrt", graph_of()) == KEEP_ALL


def test_numbered_blocks_count_where_at_least_two_are_of_a_kind() -> None:
    """One numbered block of each kind repeats nothing: the spine counts, its blocks without a number too."""
    different = [block("stem", "Conv2d"), block("0", "Linear"), block("1", "Bilinear")]
    chain = tuple(part.fqn for part in different)
    assert graph_of(*different, chain=chain).repeats == chain
    alike = [block("stem", "Conv2d"), block("0", "Linear"), block("1", "Linear")]
    assert graph_of(*alike, chain=chain).repeats == ("0", "1")


@pytest.mark.parametrize("name", [*PRESETS, "every-3", "every-17"])
def test_every_name_works_on_every_shape(name: str) -> None:
    assert is_preset(name)
    for net in (gpt(12), sequential(9), unet(4), gpt(2)):
        policy = preset(name, net)
        assert set(policy.blocks) <= set(net.by_fqn)


@pytest.mark.parametrize("name", ["every-0", "every-", "every-x", "al", "", "policy.yaml", "every-K"])
def test_unknown_names_are_refused_with_the_nearest(name: str) -> None:
    assert not is_preset(name)
    with pytest.raises(InvalidPolicy, match=f"no preset {name}"):
        preset(name, gpt(3))
    with pytest.raises(InvalidPolicy, match="Did you mean sqrt"):
        preset("sqr", gpt(3))


def test_each_rung_recomputes_more_and_stays_safe() -> None:
    graph = gpt(4, n_inner=3)
    rungs = dict(ladder(graph))
    assert list(rungs)[0] == "every block" and rungs["every block"] == preset("all", graph)
    sizes = [len(policy.blocks) for policy in rungs.values()]
    assert sizes == sorted(set(sizes)) and len(sizes) == 3
    assert sizes == sorted(set(sizes)) and len(sizes) == 3
    sizes = [len(policy.blocks) for _, policy in ladder(gpt(4))]
    assert sizes == sorted(set(sizes)), "no rung repeats the one below"
    assert not any(one.severity == "error" for policy in rungs.values() for one in hazards(graph, policy))


NAMES = ["", "embedding", *(f"layers.{i}{part}" for i in range(11) for part in ("", ".mlp", ".mlp.0", ".norm"))]


def test_what_matches_nothing_says_what_is_near() -> None:
    with pytest.raises(InvalidPolicy, match=r"No block matches 'layers\.\*\.mpl'") as error:
        matching("layers.*.mpl", NAMES)
    assert "layers.0.mlp" in error.value.hint


@pytest.mark.parametrize(("n_names", "words"), [(2000, "No block matches"), (2001, "500 patterns for a model of 2001")])
def test_a_million_pairs_of_pattern_and_name_are_tried(n_names: int, words: str) -> None:
    policy = Policy(units=tuple(Unit(blocks=(f"stranger{i}.*",)) for i in range(500)))
    with pytest.raises(InvalidPolicy, match=words):
        expanded(policy, [f"layers.{i}" for i in range(n_names)])


def test_a_pattern_is_put_onto_a_model() -> None:
    model = load(ref("gpt")).model
    with apply_policy(model, Policy.recompute(["blocks.*.mlp"])) as handle:
        assert handle.policy.blocks == tuple(f"blocks.{i}.mlp" for i in range(4))
    graph = describe(ref("gpt"))
    assert set(matching("blocks.*.mlp", [block.fqn for block in graph.blocks])) == set(handle.policy.blocks)


@pytest.mark.parametrize(("before", "now", "words"), [
    ({"a": 1}, {"a": 1}, ""),
    ({"blocks.*": 12, "blocks.*.mlp": 12}, {"blocks.*": 16, "blocks.*.mlp": 16}, "blocks.* are 16, and were 12"),
    ({"blocks.*": 2}, {"blocks.*": 1}, "blocks.* is 1, and were 2"),
    ({"norm": 1, "norm.a": 1}, {"adapter": 1}, "new: adapter; gone: norm"),
    ({"blocks.*": 1}, {"blocks.*": 3, "head": 1}, "blocks.* are 3, and was 1; new: head"),
    ({}, dict.fromkeys("abcdef", 1), "new: a, b, c, d and 2 more"),
])  # fmt: skip
def test_what_differs(before: dict[str, int], now: dict[str, int], words: str) -> None:
    assert differences(before, now) == words


GRAPH = graphs.gpt(6)
NAMES_OF_MARKS = [block.fqn for block in GRAPH.blocks if block.fqn]


@given(st.sets(st.sampled_from(NAMES_OF_MARKS)), st.sets(st.sampled_from(NAMES_OF_MARKS)))
def test_exactly_the_marked_blocks_are_recomputed(first: set[str], second: set[str]) -> None:
    policy = policy_after(policy_after(KEEP_ALL, first, GRAPH), second, GRAPH)
    assert set(policy.blocks) == second
    assert len(policy.blocks) == len(second)
    order = [NAMES_OF_MARKS.index(unit.blocks[0]) for unit in policy.units]
    assert order == sorted(order)


def test_a_segment_falls_into_what_is_left_of_it() -> None:
    policy = Policy.recompute([tuple(f"blocks.{i}" for i in range(5))])
    after = policy_after(policy, [f"blocks.{i}" for i in (0, 1, 3, 4)], GRAPH)
    assert [unit.blocks for unit in after.units] == [("blocks.0", "blocks.1"), ("blocks.3", "blocks.4")]


def test_actions_and_options_stay() -> None:
    unit = Unit(blocks=("blocks.1",), action="save_ops", save_ops=("aten.mm.default",))
    policy = Policy(units=(unit,), early_stop=False, running_stats="every_forward")
    after = policy_after(policy, ["blocks.1", "blocks.0"], GRAPH)
    assert after.units == (Unit(blocks=("blocks.0",)), unit)
    assert (after.early_stop, after.running_stats) == (False, "every_forward")


def test_two_units_become_one_segment() -> None:
    policy = Policy.recompute(["blocks.0", "blocks.1", "blocks.3"])
    units = joined(policy, "blocks.0", "blocks.1").units
    assert [unit.blocks for unit in units] == [("blocks.0", "blocks.1"), ("blocks.3",)]
    assert joined(policy, "blocks.0", "blocks.2") == policy


def test_blocks_the_model_lacks_are_named() -> None:
    assert unknown_blocks(Policy.recompute(["blocks.9", "head"]), GRAPH) == ("blocks.9",)
