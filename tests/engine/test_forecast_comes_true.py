"""What the page predicts at a toggle is what a run then measures: sample models and presets, to two in a thousand."""

from __future__ import annotations

from functools import cache

import pytest

from explorer.engine.describe import describe
from explorer.engine.measure import measure
from explorer.plan.forecast import Forecaster
from explorer.plan.presets import preset
from explorer.record import Measurement, ModelGraph, ModelRef, Policy, RunSpec


@cache
def known(sample: str) -> tuple[ModelGraph, Measurement]:
    model = ModelRef(target=f"sample_models/{sample}.py", size="small")
    return describe(model), measure(RunSpec(model=model, n_repeats=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("gpt", "every-2"),
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
    said = Forecaster(base, graph).forecast(policy)
    run = measure(RunSpec(model=base.spec.model, policy=policy, n_repeats=1))
    assert run.step_peak_bytes is not None and base.step_peak_bytes is not None
    assert said.step_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.002)
    assert said.saved_after_forward_bytes == pytest.approx(run.saved_after_forward_bytes, rel=1e-4)
    for fqn in policy.blocks:
        left = base.by_fqn[fqn].saved_after_forward_bytes - said.freed_bytes[fqn]
        assert left == run.by_fqn[fqn].saved_after_forward_bytes, fqn
    assert said.flop_ratio is not None and base.total_flops is not None
    assert round(said.flop_ratio * base.total_flops) == run.total_flops
    assert run.step_peak_bytes < 0.8 * base.step_peak_bytes, "a policy that changes nothing proves nothing"
