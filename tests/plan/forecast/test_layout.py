"""Which reentrant units leave a copied gradient behind: those that alone read what does not lie row after row."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.layout import with_copied_gradients
from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import saved_by_calls
from explorer.record import Edge, ModelGraph, Unit
from explorer.record.graph import Trait
from tests.graphs import block
from tests.plan.why.test_peak import graph
from tests.view.builders import Chain, measured

RUN = measured(Chain(n_blocks=3))
REPLAY = Replay.of(RUN, None)
ONE, TWO = (Unit(blocks=(fqn,)) for fqn in ("layers.1", "layers.2"))
UNITS = {unit: saved_by_calls(REPLAY, unit.blocks, stops_early=False) for unit in (ONE, TWO)}


def chain(*strided: str, skip: bool = False) -> ModelGraph:
    """Three layers in a row; `skip`: what layers.0 makes is added to what layers.2 makes as well."""
    traits: dict[str, tuple[Trait, ...]] = {fqn: ("strided_inputs",) for fqn in strided}
    blocks = tuple(block(f"layers.{i}", "B", traits=traits.get(f"layers.{i}", ())) for i in range(3))
    edges = [Edge(source=f"layers.{i}", target=f"layers.{i + 1}", n_bytes=1, data=i) for i in range(2)]
    if skip:
        edges.append(Edge(source="layers.0", target=":add", n_bytes=1, data=0))
    return ModelGraph(model=graph().model, blocks=blocks, edges=tuple(edges))


def copied(of: ModelGraph | None) -> dict[str, tuple[tuple[int, int, int], ...]]:
    units = with_copied_gradients(REPLAY, UNITS, of)
    return {unit.blocks[0]: call.copies for unit, (call,) in units.items() if call.copies}


def test_from_the_end_of_its_backward_to_the_end_of_all_backward() -> None:
    (call,) = UNITS[ONE]
    assert RUN.allocations is not None
    size = RUN.allocations.n_bytes[call.inputs[0]]
    assert copied(chain("layers.1")) == {"layers.1": ((call.ends, REPLAY.backward_ends(call.ends), size),)}
    assert call.ends < REPLAY.backward_ends(call.ends)


def test_the_first_in_backward_changes_it_for_all() -> None:
    assert copied(chain("layers.1", "layers.2")).keys() == {"layers.2"}


@pytest.mark.parametrize("of", [None, chain(), chain("layers.0"), chain("layers.1", skip=True)])
def test_what_lies_row_after_row_or_has_other_readers_changes_nothing(of: ModelGraph | None) -> None:
    assert copied(of) == {}


def test_an_edge_inside_of_the_unit_is_no_other_reader() -> None:
    inner = (block("layers.1.a", "L"), block("layers.1.b", "L"))
    edges = (
        Edge(source="layers.0", target="layers.1.a", n_bytes=1, data=0),
        Edge(source="layers.0", target="layers.1:add", n_bytes=1, data=0),
        Edge(source="layers.1.a", target="layers.1.b", n_bytes=1, data=1),
        Edge(source="layers.1.a", target="layers.2", n_bytes=1, data=1),
        Edge(source="layers.1.b", target="layers.2", n_bytes=1, data=2),
    )
    plain = chain("layers.1")
    assert copied(msgspec.structs.replace(plain, blocks=(*plain.blocks, *inner), edges=edges)).keys() == {"layers.1"}
