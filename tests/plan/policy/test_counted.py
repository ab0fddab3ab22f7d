"""What presets count: stretches, segments, and what is left out."""

from __future__ import annotations

import math

import msgspec
import pytest

from explorer.plan.policy.counted import counted_units, in_error, runs, segments
from explorer.record import Block, ModelGraph
from tests.graphs import block, gpt
from tests.plan.why.test_peak import graph


def chain(*blocks: Block) -> ModelGraph:
    """Children of one Sequential, called one after the other."""
    around = block("net", "Sequential", sum(one.saved_bytes for one in blocks) / 2**20)
    return ModelGraph(model=graph().model, blocks=(block("", "M"), around, *blocks), edges=())


@pytest.mark.parametrize("n_blocks", [1, 2, 5, 9, 12, 30])
def test_segments_are_about_as_many_as_the_root_and_of_about_equal_length(n_blocks: int) -> None:
    known = chain(*(block(f"net.{i}", "Linear") for i in range(n_blocks)))
    parts = segments([f"net.{i}" for i in range(n_blocks)], known)
    assert [fqn for part in parts for fqn in part] == [f"net.{i}" for i in range(n_blocks)]
    assert len(parts) == round(math.sqrt(n_blocks)) and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_no_segment_begins_with_what_writes_into_its_input() -> None:
    known = chain(*(block(f"net.{i}", "B", traits=("changes_inputs",) if i == 2 else ()) for i in range(4)))
    assert segments([f"net.{i}" for i in range(4)], known) == (("net.0", "net.1", "net.2"), ("net.3",))


def test_layers_that_repeat_are_counted_and_what_a_hazard_forbids_is_not() -> None:
    known = gpt(3)
    layers = tuple((f"blocks.{i}",) for i in range(3))
    assert counted_units(known) == layers
    cached = tuple(
        msgspec.structs.replace(one, traits=("changes_inputs",)) if one.fqn == "blocks.1" else one
        for one in known.blocks
    )
    wrong = msgspec.structs.replace(known, blocks=cached)
    assert in_error(wrong, layers) == [("blocks.1",)] and ("blocks.1",) not in counted_units(wrong)


def test_neighbours_that_hand_on_stand_in_one_stretch() -> None:
    known = gpt(4)
    hands_on = {f"blocks.{i}": f"blocks.{i - 1}" for i in (1, 3)}
    following = tuple(msgspec.structs.replace(one, follows=hands_on.get(one.fqn, "")) for one in known.blocks)
    units = [(f"blocks.{i}",) for i in range(4)]
    assert runs(units, msgspec.structs.replace(known, blocks=following)) == [units[:2], units[2:]]
