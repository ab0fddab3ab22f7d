"""A run that its forecast did not foresee comes with the likely reason, one that agrees with none."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from explorer.plan.forecast.contradiction import contradiction
from explorer.record import Measurement, ModelGraph, Policy
from tests.graphs import block
from tests.plan.why.test_peak import graph as chain_graph
from tests.view.builders import Chain, measured


def graph(**of_first: object) -> ModelGraph:
    blocks = [block("", "M"), block("layers.0", str(of_first.pop("kind", "B")), **of_first), block("layers.1", "B")]
    return ModelGraph(model=chain_graph().model, blocks=tuple(blocks), edges=())


def run(**options: object) -> Measurement:
    measurement = measured(Chain(), [0])
    policy = Policy.recompute(["layers.0"], **options)
    return msgspec.structs.replace(measurement, spec=msgspec.structs.replace(measurement.spec, policy=policy))


def off(share: float, told: Measurement, of: ModelGraph, baseline: Measurement | None = None) -> str:
    return contradiction(round((1 + share) * (told.step_peak_bytes or 0)), told, of, baseline)


def test_a_forecast_that_comes_true_contradicts_nothing() -> None:
    assert not off(0.009, run(), graph(kind="LSTM")) and not off(-0.009, run(), graph(kind="LSTM"))
    assert not contradiction(None, run(), graph())


@pytest.mark.parametrize(
    ("told", "of", "reason"),
    [
        (run(), graph(kind="LSTM"), "layers.0 is recurrent"),
        (run(), graph(traits=("keeps_cache",)), "layers.0 is handed a cache"),
        (run(), graph(n_calls=2), "layers.0 is called more than once"),
        (run(), graph(), "nothing that is known"),
    ],
)
def test_the_reason_is_what_is_known_of_the_recomputed_blocks(told: Measurement, of: ModelGraph, reason: str) -> None:
    sentence = off(-0.05, told, of, measured(Chain()))
    assert sentence.startswith("The forecast of ") and "5.0% below" in sentence and reason in sentence
    assert "above" in off(0.05, told, of)


def test_forwards_that_make_other_tensors_are_told_apart() -> None:
    other = measured(dataclasses.replace(Chain(), n_parts=3))
    assert "did not make the same tensors" in off(0.05, run(), graph(), other)
    assert "nothing that is known" in off(0.05, run(), graph(), measured(Chain()))
