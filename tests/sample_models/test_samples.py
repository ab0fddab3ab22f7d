"""Every sample keeps its promises: it trains, splits, survives recompute bit by bit, and tells a lesson."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from explorer.engine.bench.recording import record_step
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.device.device import device_of
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.rng import seed_everything
from explorer.plan.catalogue import Sample, catalogue, recorded_sample
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Failure, Measurement, RunSpec
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy, Unit
from tests.engine.graphs import graph_of_loaded

TINY: dict[str, dict[str, int | float | str | bool]] = {
    "gpt": {"n_layers": 2, "width": 16, "n_heads": 2, "length": 8, "batch": 4, "vocabulary": 20},
    "mlp": {"n_layers": 4, "width": 8, "batch": 8},
    "moe": {"n_layers": 2, "width": 16, "length": 8, "batch": 4, "vocabulary": 20},
    "recurrent": {"length": 4, "width": 8, "batch": 4, "vocabulary": 10},
    "resnet": {"width": 4, "blocks_per_stage": 2, "n_stages": 2, "side": 8, "batch": 4},
    "tied_lm": {"n_layers": 2, "width": 16, "length": 8, "batch": 4, "vocabulary": 20},
    "unet": {"width": 4, "depth": 2, "side": 8, "batch": 4},
    "vit": {"n_layers": 2, "width": 16, "n_heads": 2, "side": 8, "batch": 4},
}
samples = pytest.mark.parametrize("name", TINY)


def tiny(name: str) -> Loaded:
    torch.set_num_threads(1)
    return load(ModelRef(target=f"sample_models/{name}.py", arguments=TINY[name]))


def step(loaded: Loaded, policy: Policy) -> dict[str, Tensor]:
    seed_everything(1)
    with apply_policy(loaded.model, policy):
        loaded.model.zero_grad()
        loaded.loss(loaded.output()).backward()
    gradients = {name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None}
    return gradients | {f"buffer {name}": b.clone() for name, b in loaded.model.named_buffers()}


def test_every_sample_is_tested(root: Path) -> None:
    assert {sample.name for sample in catalogue(root / "sample_models")} == set(TINY)


@pytest.mark.parametrize("sample", catalogue(), ids=lambda sample: sample.name)
def test_the_docstring_is_a_lesson_and_both_sizes_are_there(sample: object) -> None:
    assert {"small", "gpu"} <= set(sample.sizes)  # type: ignore[attr-defined]
    assert len(sample.lesson.split()) >= 50  # type: ignore[attr-defined]


@samples
def test_every_parameter_gets_a_gradient(name: str) -> None:
    loaded = tiny(name)
    gradients = step(loaded, Policy())
    assert {n for n, _ in loaded.model.named_parameters()} <= gradients.keys()
    assert all(tensor.isfinite().all() for tensor in gradients.values())
    dead = [n for n, _ in loaded.model.named_parameters() if not gradients[n].any()]
    assert all("expert" in n for n in dead), dead


@samples
def test_recompute_of_every_spine_block_is_bitwise_equal(name: str) -> None:
    graph = graph_of_loaded(tiny(name))
    bare, recomputed = step(tiny(name), Policy()), step(tiny(name), Policy.recompute(graph.chain))
    assert bare.keys() == recomputed.keys()
    assert [key for key in bare if not torch.equal(bare[key], recomputed[key])] == []


@samples
def test_the_forward_is_a_walk_that_can_be_cut_between_all_blocks(name: str) -> None:
    graph = graph_of_loaded(tiny(name))
    assert len(graph.chain) >= 3
    assert [cut.refusal for cut in graph.cuts] == [None] * (len(graph.chain) - 1)
    assert set(graph.repeats) <= set(graph.chain)


@samples
def test_the_loss_is_a_mean_over_a_batch_that_splits(name: str) -> None:
    """In eval mode, where nothing draws: two halves average to the whole."""
    loaded = tiny(name)
    loaded.model.eval()
    halves = [
        loaded.loss(call(loaded.model, inputs), targets)
        for inputs, targets in zip(loaded.inputs.chunk(2), loaded.targets.chunk(2), strict=True)
    ]
    torch.testing.assert_close(sum(halves) / 2, loaded.loss(loaded.output()), rtol=1e-5, atol=1e-6)


@samples
def test_bfloat16_autocast_trains(name: str) -> None:
    loaded = tiny(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loaded.loss(loaded.output())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in loaded.model.parameters())


@samples
@pytest.mark.parametrize("size", ["small", "gpu"])
def test_the_factory_takes_exactly_its_sizes(name: str, size: str) -> None:
    with torch.device("meta"):
        loaded = load(ModelRef(target=f"sample_models/{name}.py", size=size))
    assert loaded.inputs.shape[0] == loaded.targets.shape[0]
    assert sum(p.numel() for p in loaded.model.parameters()) > 1e5


def recorded_again(spec: RunSpec) -> Measurement:
    """The second step, recorded as a run does; what a run repeats or times is left out."""
    failures: list[Failure] = []
    with preserve_global_state():
        trainee = prepare(spec)
        run_step(trainee)
        run = record_step(trainee, device_of(trainee.device), failures).measurement(spec)
    assert not failures
    return run


@pytest.mark.parametrize("sample", catalogue(), ids=lambda sample: sample.name)
def test_the_bundled_run_is_what_the_sample_does(sample: Sample) -> None:
    """What does not depend on the machine is the same here. A change of a sample needs new files:
    python -m tests.golden.make samples
    """
    model = ModelRef(target=sample.target, size=next(iter(sample.sizes)))
    bundled = recorded_sample(model)
    assert bundled is not None and bundled.run.times is not None and bundled.front.plans
    assert bundled.run.graph == describe(model)
    again = recorded_again(RunSpec(model=model))
    for name in ("step_peak_bytes", "saved_after_forward_bytes", "total_flops", "peak_phase"):
        assert getattr(again, name) == getattr(bundled.run, name), name
    blocks = tuple(Unit(blocks=(fqn,), action="offload") for fqn in bundled.run.graph.repeats)
    forecast = Forecaster(bundled.run, bundled.run.graph).forecast(Policy(units=blocks))
    offloaded = recorded_again(RunSpec(model=model, policy=Policy(units=blocks)))
    if sample.name == "moe":  # which tokens an expert gets depends on the machine
        assert forecast.host_peak_bytes == pytest.approx(offloaded.peaks.offloaded_peak_bytes, rel=0.02)
    else:
        assert forecast.host_peak_bytes == offloaded.peaks.offloaded_peak_bytes
        assert forecast.step_peak_bytes == offloaded.step_peak_bytes
