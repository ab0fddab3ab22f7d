"""Policies whose peak is not predicted, and the sentence that says why."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.forecast.unforeseen import unforeseen
from explorer.record import ModelGraph, Policy, Unit
from explorer.record.plan import Forecast
from tests.graphs import block as graph_block
from tests.plan.forecast.two_blocks import two_blocks
from tests.plan.why.test_peak import graph
from tests.view.builders import measured

OFFLOADED = Unit(blocks=("layers.1",), action="offload")
KEEPING = Unit(blocks=("layers",), action="save_ops", save_ops=("aten.mm.default",))
KEEPING_INSIDE = msgspec.structs.replace(KEEPING, blocks=("layers.1",))
INNER, OUTER = Unit(blocks=("layers.1",)), Unit(blocks=("layers",))


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        (Policy(units=(OFFLOADED,)), "offload"),
        (Policy(units=(OUTER, OFFLOADED)), "offload"),
        (Policy(units=(INNER,), use_reentrant=True), "reentrant checkpointing"),
        (Policy(units=(OFFLOADED,), use_reentrant=True), "offload, reentrant checkpointing"),
        (Policy(units=(KEEPING, INNER)), "kept operators inside or around another unit"),
        (Policy(units=(OUTER, KEEPING_INSIDE)), "kept operators inside or around another unit"),
        (Policy(units=(INNER, OUTER)), ""),
        (Policy(units=(KEEPING_INSIDE, Unit(blocks=("layers.2",)))), ""),
        (Policy(use_reentrant=True), ""),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_policy_outside_the_forecast_has_no_figure_and_one_sentence(policy: Policy, parts: str, device: str) -> None:
    run = measured()
    run = msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, device=device))
    forecaster = Forecaster(run, graph())
    assert unforeseen(policy, graph()) == (f"The forecast does not cover {parts}: press Run." if parts else "")
    assert (forecaster.forecast(policy) == Forecast()) == bool(parts)
    assert (forecaster.line(policy) is None) == (forecaster.at_peak(policy) is None) == bool(parts)


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
