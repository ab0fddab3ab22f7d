"""Every option of a step crossed with every kind of policy: figures of the graph are those of the run's own forward."""

from __future__ import annotations

import random
import statistics
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Measurement, ModelGraph, Policy, RunSpec
from tests.engine.bench import third_party_nets
from tests.engine.bench.random_policies import random_policy

FROZEN = {
    "llama": ("model.embed_tokens", "model.layers.0"),
    "neox": ("gpt_neox.embed_in", "gpt_neox.layers.0", "gpt_neox.layers.1"),
    "vit": ("vit.embeddings",),
    "bart": ("model.shared", "model.encoder"),
    "rotated": ("embedding", "layers.0"),
    "convolutions": ("0", "1", "2"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "eval mode": {"mode": "eval"},
    "frozen blocks": {},
    "frozen blocks in eval mode": {"mode": "eval", "n_accumulation": 2},
    "accumulation": {"n_accumulation": 4},
    "autocast": {"autocast": "bfloat16"},
    "autocast in eval mode": {"autocast": "bfloat16", "mode": "eval", "optimizer": "none"},
    "another type": {"dtype": "float64", "optimizer": "sgd", "momentum": 0.9},
    "a narrow type in eval mode": {"dtype": "bfloat16", "mode": "eval"},
    "output held": {"holds_output": True, "optimizer": "none"},
}
KINDS = ("flat", "nested", "segments", "save_ops", "three levels")
MOST_OFF = 0.005
FEW_BYTES = 256
"""Gradients of biases come and go at the very moment of the peak."""


def spec_of(model: str, options: str) -> RunSpec:
    frozen = FROZEN[model] if options.startswith("frozen") else ()
    return RunSpec(model=third_party_nets.ref(model), n_repeats=0, frozen=frozen, **OPTIONS[options])


@cache
def step(model: str, options: str) -> tuple[ModelGraph, Measurement]:
    """The graph is described as in training, as a page does before it knows the options."""
    spec = spec_of(model, options)
    run = measure(spec)
    assert run.failure is None, run.failure
    return describe(spec.model), run


def policy_of(kind: str, graph: ModelGraph, run: Measurement, seed: str) -> Policy:
    draw = random.Random(seed)
    if kind != "three levels":
        return random_policy(kind, graph, run, draw)
    # A dropout in eval mode saves nothing. As a unit inside another it holds 5,056 bytes that no forecast counts.
    own = run.graph or graph
    inner = [block.fqn for fqn in graph.repeats for block in own.children[fqn] if block.saved_bytes]
    holder = graph.repeats[0].rpartition(".")[0].rpartition(".")[0]
    outer = [holder] if holder else []
    return Policy.recompute([*outer, *graph.repeats, *(fqn for fqn in inner if draw.random() < 0.7)])


def off(model: str, options: str, kind: str) -> float | None:
    """Share by which the forecast of the peak is off; the FLOPs are exact. None: nothing is forecast."""
    graph, run = step(model, options)
    policy = policy_of(kind, graph, run, f"{model} {options} {kind}")
    forecast, truth = Forecaster(run, graph).forecast(policy), measure(replace(run.spec, policy=policy))
    assert truth.failure is None, truth.failure
    if forecast.flop_ratio is not None and run.total_flops is not None:
        assert round(forecast.flop_ratio * run.total_flops) == truth.total_flops, (model, options, kind)
    if forecast.step_peak_bytes is None or truth.step_peak_bytes is None:
        return None
    bytes_off = forecast.step_peak_bytes - truth.step_peak_bytes
    return 0.0 if abs(bytes_off) <= FEW_BYTES else bytes_off / truth.step_peak_bytes


def crossed(pairs: list[tuple[str, str]]) -> None:
    shares = {(*pair, kind): share for pair in pairs for kind in KINDS if (share := off(*pair, kind)) is not None}
    beyond = {case: f"{share:+.2%}" for case, share in shares.items() if abs(share) > MOST_OFF}
    assert not beyond
    assert len(shares) >= 0.8 * len(pairs) * len(KINDS), "kept operators alone are sometimes not forecast"
    assert statistics.median(map(abs, shares.values())) == 0


def models() -> list[str]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return ["rotated", "convolutions"]
    return list(third_party_nets.NAMES)


@pytest.mark.parametrize("options", OPTIONS)
def test_an_option_of_the_step_with_every_kind_of_policy(options: str) -> None:
    """One model has dropout behind its products, so that evaluation saves less."""
    crossed([("rotated", options)])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", models())
def test_every_option_of_the_step_with_every_kind_of_policy(model: str, options: str) -> None:
    crossed([(model, options)])


def test_a_frozen_block_in_front_is_not_priced_as_if_it_ran_again() -> None:
    graph, run = step("rotated", "frozen blocks")
    forecaster = Forecaster(run, graph)
    assert forecaster.forecast(Policy.recompute(["layers.0"])).flop_ratio == 1
    assert forecaster.forecast(Policy.recompute(["layers.1"])).flop_ratio > 1


def test_a_description_knows_the_conditions_of_the_run() -> None:
    spec = spec_of("rotated", "frozen blocks")
    graph = describe(spec.model, conditions=spec.conditions)
    assert graph.conditions == spec.conditions and "layers.0" in graph.saves_nothing
    assert measure(spec).graph == graph
    strange = replace(spec.conditions, frozen=(*spec.frozen, "no.such.block"))
    assert "layers.0" in describe(spec.model, conditions=strange).saves_nothing, "the run refuses the name"
