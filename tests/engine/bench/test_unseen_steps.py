"""Steps that nobody ran are those that somebody runs then: the baseline from a run with recompute, a larger batch."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.names import is_within
from explorer.plan.policy.presets import preset
from explorer.plan.predict.baseline import at_size, keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Measurement, ModelGraph, ModelRef, Policy, RunSpec

FEW_LAYERS = 4
"""As good as the twelve that a sample model has: they are alike."""


def model(sample: str, **arguments: int) -> ModelRef:
    return ModelRef(target=f"sample_models/{sample}.py", size="small", arguments=dict(arguments))


def drawn(graph: ModelGraph, seed: int) -> Policy:
    """A flat, a nested or a segmented policy with some of torch's options."""
    draw = random.Random(seed)
    called = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    chosen: list[str] = []
    for fqn in draw.sample(called, len(called)):
        alone = not any(is_within(fqn, other) or is_within(other, fqn) for other in chosen)
        if draw.random() < 0.4 and (alone or seed % 3):
            chosen.append(fqn)
    policy = preset("sqrt", graph) if seed % 3 == 2 else Policy.recompute(chosen)
    stashes = draw.random() < 0.7 or any(block.uses_rng for block in graph.blocks)
    stops = draw.random() < 0.7
    return msgspec.structs.replace(policy, preserve_rng_state=stashes, early_stop=stops)


def errors(base: Measurement, graph: ModelGraph, seeds: range) -> list[float]:
    """As shares of the baseline's peak, put together from runs of drawn policies."""
    shares = []
    for seed in seeds:
        run = measure(msgspec.structs.replace(base.spec, policy=drawn(graph, seed)))
        told = keep_all_from(run, graph)
        assert told is not None and told.origin == ("predicted" if run.spec.policy.units else "measured"), run.failure
        assert told.total_flops == base.total_flops
        assert told.saved_after_forward_bytes == pytest.approx(base.saved_after_forward_bytes, rel=5e-3)
        assert told.step_peak_bytes is not None and base.step_peak_bytes is not None
        shares.append(abs(told.step_peak_bytes / base.step_peak_bytes - 1))
    return shares


def test_the_baseline_of_a_step_that_fits_only_with_recompute() -> None:
    ref = model("resnet", batch=4)
    graph, base = describe(ref), measure(RunSpec(model=ref, n_repeats=0))
    shares = errors(base, graph, range(2))
    assert max(shares) <= 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["gpt", "mlp", "unet", "tied_lm", "moe", "vit", "recurrent"])
def test_the_baseline_from_flat_nested_and_segmented_policies(sample: str) -> None:
    few = {"n_layers": FEW_LAYERS} if sample in ("tied_lm", "moe", "vit") else {}
    ref = model(sample, batch=2, **few)
    graph, base = describe(ref), measure(RunSpec(model=ref, n_repeats=0))
    shares = errors(base, graph, range(3))
    assert max(shares) <= 5e-3 and statistics.median(shares) <= 1e-4, shares


@pytest.mark.parametrize(
    ("sample", "units", "sizes"),
    [
        ("gpt", ["embedding.dropout"], {"n_layers": 1, "width": 32, "length": 32, "batch": 8, "vocabulary": 64}),
        ("resnet", [("stem", "blocks", "head")], {"blocks_per_stage": 2, "n_stages": 2, "side": 8, "batch": 1}),
    ],
)
def test_what_only_a_checkpoint_keeps_is_not_in_the_baseline(
    sample: str, units: list[str | tuple[str, ...]], sizes: dict[str, int]
) -> None:
    """A sum made for a dropout, which saves its mask alone; copies of running statistics, made before the rerun."""
    ref = model(sample, **sizes)
    graph, base = describe(ref), measure(RunSpec(model=ref, n_repeats=0))
    told = keep_all_from(measure(msgspec.structs.replace(base.spec, policy=Policy.recompute(units))), graph)
    assert told is not None and told.allocations is not None and base.allocations is not None
    assert told.saved_after_forward_bytes == pytest.approx(base.saved_after_forward_bytes, rel=1e-4)
    assert told.step_peak_bytes == pytest.approx(base.step_peak_bytes, rel=1e-4)
    assert sorted(told.allocations.n_bytes) == sorted(base.allocations.n_bytes)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_accumulated_microbatches_each_repeat_their_own_forward(autocast: str) -> None:
    ref = model("mlp", batch=8)
    graph = describe(ref)
    base = measure(RunSpec(model=ref, n_repeats=0, n_accumulation=2, autocast=autocast))  # type: ignore[arg-type]
    run = measure(msgspec.structs.replace(base.spec, policy=preset("all", graph)))
    told = keep_all_from(run, graph)
    assert told is not None and told.step_peak_bytes == pytest.approx(base.step_peak_bytes, rel=1e-3)
    assert told.saved_after_forward_bytes == pytest.approx(base.saved_after_forward_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("sample", "key", "sizes", "large"),
    [
        ("mlp", "batch", (4, 8), 100),
        pytest.param("gpt", "batch", (2, 4), 6, marks=pytest.mark.slow),
        pytest.param("gpt", "length", (8, 16, 24), 96, marks=pytest.mark.slow),
        pytest.param("moe", "batch", (2, 3), 5, marks=pytest.mark.slow),
    ],
)
def test_a_larger_step_to_the_byte_and_every_policy_of_it(
    sample: str, key: str, sizes: tuple[int, ...], large: int
) -> None:
    def run(size: int, policy: Policy | None = None) -> Measurement:
        return measure(
            RunSpec(model=model(sample, n_layers=FEW_LAYERS, **{key: size}), policy=policy or Policy(), n_repeats=0)
        )

    real = run(large)
    told = at_size({size: run(size) for size in sizes}, large, real.spec)
    assert told.event_by_event and told.measurement is not None
    assert told.step_peak_bytes == pytest.approx(real.step_peak_bytes, rel=1e-5)
    assert told.measurement.total_flops == real.total_flops
    graph = describe(real.spec.model)
    policy = preset("all", graph)
    foretold = Forecaster(told.measurement, graph).forecast(policy)
    assert foretold.step_peak_bytes == pytest.approx(run(large, policy).step_peak_bytes, rel=1e-3)
