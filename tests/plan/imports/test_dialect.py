"""What readers of settings share: the layers they count, and a policy out of what they read."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import BadInput
from explorer.plan.imports.dialect import Said, layer_lists, longest_list, reading, refused, whole, within
from explorer.plan.imports.door import read
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from tests.graphs import gpt
from tests.plan.imports.layers import FULL


def test_a_model_without_layers_is_refused(graph: ModelGraph) -> None:
    flat = msgspec.structs.replace(graph, blocks=graph.blocks[:3])
    for text in ("gradient_checkpointing: true", "activation_checkpoint:full", f"{FULL} uniform"):
        with pytest.raises(BadInput, match="numbered layers"):
            read(text, flat)


def test_statistics_move_twice_as_they_do_there(graph: ModelGraph) -> None:
    moving = tuple(
        msgspec.structs.replace(b, traits=("running_statistics",)) if b.fqn == "layers.1" else b for b in graph.blocks
    )
    reading = read(f"{FULL} block --recompute-num-layers 2", msgspec.structs.replace(graph, blocks=moving))
    assert reading.policy.running_stats == "every_forward" and any("move twice" in note for note in reading.notes)


def test_lists_of_layers_are_found_by_their_holder() -> None:
    assert layer_lists(gpt(3, names="model.layers")) == {"model.layers": tuple(f"model.layers.{i}" for i in range(3))}
    holder, layers = longest_list("x", gpt(2))
    assert (holder, layers) == ("blocks", ("blocks.0", "blocks.1"))


def test_blocks_inside_of_layers_go_by_their_names() -> None:
    graph = gpt(2)
    assert within(graph, ("blocks.1",), ("mlp",)) == ("blocks.1.mlp",)
    assert within(graph, ("blocks.0",), ("no_such",)) == ()
    assert whole(("a", "b")) == (Unit(blocks=("a",)), Unit(blocks=("b",)))


def test_a_reading_with_reasons_is_approximated() -> None:
    graph = gpt(2)
    plain = reading("X 1", graph, Said(units=whole(("blocks.0",)), options=(("early_stop", False),)))
    assert (plain.fit, plain.source, plain.policy.early_stop) == ("exact", "X 1", False)
    assert reading("X 1", graph, Said(reasons=("lost",))).fit == "approximated"
    assert refused("X 1", "no.").hint != "" and "X 1" in refused("X 1", "no.").sentence
