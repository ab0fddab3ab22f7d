"""Policies whose peak is not predicted, and runs that contradict a forecast, with the sentence that says why."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.not_predicted import contradiction, not_predicted
from explorer.record import Measurement, ModelGraph, Policy, Unit
from explorer.record.plan import Forecast
from tests.graphs import block as graph_block
from tests.plan.why.test_peak import graph
from tests.view.builders import Chain, measured, two_blocks

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
    assert not_predicted(policy, graph()) == (f"The forecast does not cover {parts}: press Run." if parts else "")
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
        sentence = not_predicted(policy, known)
        assert (foretold is None) == bool(sentence)
        return sentence

    assert "torch refuses to keep what aten.exp.default returns" in why("aten.mm.default", "aten.exp.default")
    assert "torch refuses to keep what aten.add_.Tensor returns" in why("aten.add_.Tensor")
    assert not why("aten.mm.default") and not why("aten.exp.default", block="b")


def graph_of(**of_first: object) -> ModelGraph:
    first = graph_block("layers.0", str(of_first.pop("kind", "B")), **of_first)
    blocks = (graph_block("", "M"), first, graph_block("layers.1", "B"))
    return ModelGraph(model=graph().model, blocks=blocks, edges=())


def recomputed(**options: object) -> Measurement:
    measurement = measured(Chain(), [0])
    policy = Policy.recompute(["layers.0"], **options)
    return msgspec.structs.replace(measurement, spec=msgspec.structs.replace(measurement.spec, policy=policy))


def off(share: float, told: Measurement, of: ModelGraph, baseline: Measurement | None = None) -> str:
    return contradiction(round((1 + share) * (told.step_peak_bytes or 0)), told, of, baseline)


def test_a_forecast_that_comes_true_contradicts_nothing() -> None:
    assert not off(0.009, recomputed(), graph_of(kind="LSTM")) and not off(-0.009, recomputed(), graph_of(kind="LSTM"))
    assert not contradiction(None, recomputed(), graph_of())


@pytest.mark.parametrize(
    ("told", "of", "reason"),
    [
        (recomputed(), graph_of(kind="LSTM"), "layers.0 is recurrent"),
        (recomputed(), graph_of(traits=("keeps_cache",)), "layers.0 is handed a cache"),
        (recomputed(), graph_of(n_calls=2), "layers.0 is called more than once"),
        (recomputed(), graph_of(), "no known limit"),
    ],
)
def test_the_reason_is_what_is_known_of_the_recomputed_blocks(told: Measurement, of: ModelGraph, reason: str) -> None:
    sentence = off(-0.05, told, of, measured(Chain()))
    assert sentence.startswith("The forecast of ") and "5.0% below" in sentence and reason in sentence
    assert "above" in off(0.05, told, of)


def test_forwards_that_make_other_tensors_are_told_apart() -> None:
    other = measured(dataclasses.replace(Chain(), n_parts=3))
    assert "did not make the same tensors" in off(0.05, recomputed(), graph_of(), other)
    assert "no known limit" in off(0.05, recomputed(), graph_of(), measured(Chain()))
