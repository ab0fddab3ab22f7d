"""Policies whose peak cannot be foretold are told, and why."""

from __future__ import annotations

import msgspec

from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.forecast.unforeseen import unforeseen
from explorer.record import ModelGraph, Policy, Unit
from tests.graphs import block as graph_block
from tests.plan.forecast.two_blocks import two_blocks
from tests.plan.why.test_peak import graph
from tests.view.builders import measured


def test_why_a_policy_cannot_be_foretold() -> None:
    outer = Unit(blocks=("layers",), action="save_ops", save_ops=("aten.mm.default",))
    nested = Policy(units=(outer, Unit(blocks=("layers.1",))))
    assert "layers keep chosen operators or offload, inside another unit" in unforeseen(nested, None)
    assert Forecaster(measured(), graph()).forecast(nested).step_peak_bytes is None
    other_way = Policy(units=(Unit(blocks=("layers",)), msgspec.structs.replace(outer, blocks=("layers.1",))))
    assert not unforeseen(other_way, None)
    assert unforeseen(msgspec.structs.replace(other_way, use_reentrant=True), None)
    often = ModelGraph(model=graph().model, blocks=(graph_block("layers.1", "B", n_calls=3),), edges=())
    reentrant = Policy.recompute(["layers.1"], use_reentrant=True)
    assert "called more than once" in unforeseen(reentrant, often) and not unforeseen(reentrant, graph())
    idle = ModelGraph(
        model=graph().model, blocks=(graph_block("layers.1", "B", traits=("inputs_need_no_grad",)),), edges=()
    )
    assert "train nothing" in unforeseen(reentrant, idle)
    assert not unforeseen(msgspec.structs.replace(reentrant, use_reentrant=False), idle)


def test_a_result_that_is_written_in_place_is_not_foretold() -> None:
    blocks = [graph_block(fqn, "B", rewritten_ops=("aten.exp.default",) if fqn == "a" else ()) for fqn in "ab"]
    known = ModelGraph(model=graph().model, blocks=tuple(blocks), edges=())
    forecaster = Forecaster(two_blocks(), known)

    def why(*ops: str, block: str = "a") -> str:
        policy = Policy(units=(Unit(blocks=(block,), action="save_ops", save_ops=ops),))
        foretold = forecaster.forecast(policy).step_peak_bytes
        assert foretold == forecaster.peak_bytes(policy)
        sentence = unforeseen(policy, known)
        assert (foretold is None) == bool(sentence)
        return sentence

    assert "torch refuses to keep what aten.exp.default returns" in why("aten.mm.default", "aten.exp.default")
    assert "torch refuses to keep what aten.add_.Tensor returns" in why("aten.add_.Tensor")
    assert not why("aten.mm.default") and not why("aten.exp.default", block="b")


def test_offload_beside_other_units_is_foretold_where_nothing_moves() -> None:
    """Unless one that runs again lies inside it and another around it."""

    def why(*actions: str, moves: bool = False) -> str:
        names = ("layers", "layers.1", "layers.1.mlp")
        units = tuple(Unit(blocks=(fqn,), action=action) for fqn, action in zip(names, actions))  # type: ignore[arg-type]
        return unforeseen(Policy(units=units), None, moves=moves)

    assert not why("recompute", "offload") and not why("offload", "recompute", "recompute")
    assert why("recompute", "offload", moves=True) and why("recompute", "offload", "recompute")
