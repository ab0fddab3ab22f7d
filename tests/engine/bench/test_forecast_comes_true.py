"""What the page predicts at a toggle is what a run then measures: sample models, presets and units inside units."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.price import prices
from explorer.record import Measurement, ModelGraph, ModelRef, Policy, RunSpec
from tests.engine import preset_nets

FEW: dict[str, dict[str, int]] = {
    "gpt": {"n_layers": 6, "batch": 4},
    "moe": {"n_layers": 4, "batch": 8},
    "vit": {"n_layers": 4, "batch": 4},
    "mlp": {"batch": 1024},
    "resnet": {"batch": 16},
    "recurrent": {"batch": 64},
    "unet": {"batch": 4},
    "tied_lm": {"n_layers": 4, "batch": 4},
}
"""Layers and rows are alike: of fewer a forecast is as hard, and a run is done sooner."""


@cache
def known(sample: str) -> tuple[ModelGraph, Measurement]:
    model = ModelRef(target=f"sample_models/{sample}.py", size="small", arguments=dict(FEW[sample]))
    return describe(model), measure(RunSpec(model=model, n_repeats=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("gpt", "every-2"),
        ("gpt", "sqrt"),
        ("moe", "sqrt"),
        ("vit", "sqrt"),
        ("mlp", "sqrt"),
        ("resnet", "sqrt"),
        ("resnet", "every-2"),
        ("recurrent", "all"),
        ("unet", "all"),
        ("unet", "every-2"),
        ("tied_lm", "all"),
        ("vit", "except-last"),
    ],
)
def test_a_preset_of_a_sample_model(sample: str, name: str) -> None:
    graph, base = known(sample)
    policy: Policy = preset(name, graph)
    foretold = Forecaster(base, graph).forecast(policy)
    run = measure(RunSpec(model=base.spec.model, policy=policy, n_repeats=0))
    assert run.step_peak_bytes is not None and base.step_peak_bytes is not None
    assert foretold.step_peak_bytes == pytest.approx(run.step_peak_bytes, rel=1e-4)
    assert foretold.saved_after_forward_bytes == pytest.approx(run.saved_after_forward_bytes, rel=1e-4)
    for fqn in policy.blocks:
        left = base.by_fqn[fqn].saved_after_forward_bytes - foretold.freed_bytes[fqn]
        assert left == pytest.approx(run.by_fqn[fqn].saved_after_forward_bytes, abs=16), fqn  # scalars made in C++
    assert foretold.flop_ratio is not None and base.total_flops is not None
    assert round(foretold.flop_ratio * base.total_flops) == run.total_flops
    assert run.step_peak_bytes < 0.8 * base.step_peak_bytes, "a policy that changes nothing proves nothing"


@cache
def small(sample: str, batch: int, autocast: str = "none", optimizer: str = "adamw") -> tuple[ModelGraph, Measurement]:
    model = ModelRef(target=f"sample_models/{sample}.py", size="small", arguments={"batch": batch})
    spec = RunSpec(model=model, n_repeats=0, autocast=autocast, optimizer=optimizer)  # type: ignore[arg-type]
    return describe(model), measure(spec)


def holds(graph: ModelGraph, base: Measurement, policy: Policy, *, within: float) -> Measurement:
    foretold = Forecaster(base, graph).forecast(policy)
    run = measure(msgspec.structs.replace(base.spec, policy=policy))
    assert run.failure is None and foretold.flop_ratio is not None and base.total_flops is not None
    assert foretold.step_peak_bytes == pytest.approx(run.step_peak_bytes, rel=within)
    assert foretold.saved_after_forward_bytes == pytest.approx(run.saved_after_forward_bytes, rel=2e-3)
    assert round(foretold.flop_ratio * base.total_flops) == run.total_flops
    return run


def test_a_chain_recomputed_as_a_whole_and_block_by_block() -> None:
    """Two levels: each block runs up to three times, and at no moment is more than one of them whole."""
    graph, base = small("resnet", 8)
    run = holds(graph, base, Policy.recompute(["blocks", *graph.repeats]), within=1e-4)
    alone = Forecaster(base, graph).forecast(Policy.recompute(["blocks"]))
    assert run.step_peak_bytes is not None and alone.step_peak_bytes is not None
    assert run.step_peak_bytes < 0.6 * alone.step_peak_bytes
    assert holds(graph, base, Policy.recompute(["blocks", *graph.repeats], early_stop=False), within=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("sample", "batch"), [("gpt", 2), ("resnet", 4), ("mlp", 64), ("unet", 2), ("tied_lm", 2)])
@pytest.mark.parametrize("seed", range(2))
def test_any_units_inside_units(sample: str, batch: int, seed: int) -> None:
    graph, base = small(sample, batch)
    called = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    containers = [fqn for fqn in called if graph.children[fqn] or fqn in graph.repeats]
    draw = random.Random(seed)
    chosen = [fqn for fqn in (called if seed == 0 else containers) if draw.random() < 0.6]
    holds(graph, base, Policy.recompute(chosen), within=1e-4)


@pytest.mark.parametrize(
    "units",
    [
        ["layers.0", "layers.0.attention", "layers.1", "layers.1.attention", "layers.2.attention"],
        ["angles", "layers.0"],
        [("layers.0.mlp", "layers.0.dropout"), ("layers.2.mlp", "layers.2.dropout")],
        ["layers.0", ("layers.0.mlp", "layers.0.dropout"), "layers.1.dropout"],
    ],
    ids=["keywords inside", "saves nothing", "ends in what saves nothing", "both inside"],
)
def test_units_of_a_decoder(units: list[str | tuple[str, ...]]) -> None:
    """An inner unit that takes its tensors by keyword; units and ends of units that save nothing."""
    model = preset_nets.ref("decoder")
    graph, base = describe(model), measure(RunSpec(model=model, n_repeats=0))
    holds(graph, base, Policy.recompute(units), within=1e-5)


def test_a_layer_of_which_the_model_calls_a_part_once_more() -> None:
    """Backward of that call comes first, and is not where backward of the layer begins."""
    model = preset_nets.ref("decoder", twice=True)
    graph, base = describe(model), measure(RunSpec(model=model, n_repeats=0))
    holds(graph, base, Policy.recompute(["layers.0"]), within=1e-4)


def test_a_checkpoint_keeps_what_it_was_given_until_its_backward_has_ended() -> None:
    """The skip of down.0 goes into a concatenation that up.2 saves: its checkpoint alone keeps the skip itself."""
    graph, base = small("unet", 2, optimizer="none")
    holds(graph, base, Policy.recompute(["down.0", "up.2"]), within=1e-4)


def test_keeping_a_block_whose_skip_others_hold_costs_it_once() -> None:
    """down.0 hands on what it saves: recomputed, the skip is there twice, kept it is one."""
    graph, base = small("unet", 2)
    run = measure(msgspec.structs.replace(base.spec, policy=Policy.recompute(graph.repeats)))
    price = next(price for price in prices(run, (), graph=graph) if price.blocks == ("down.0",))
    kept = measure(msgspec.structs.replace(base.spec, policy=Policy.recompute(graph.repeats[1:])))
    assert price.peak_bytes == pytest.approx(kept.step_peak_bytes, rel=1e-3)


def test_autocast_keeps_its_copies_of_weights_until_forward_ends() -> None:
    graph, base = small("gpt", 3, autocast="bfloat16")
    holds(graph, base, Policy.recompute(graph.repeats[:-1]), within=1e-4)
