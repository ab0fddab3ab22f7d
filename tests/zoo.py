"""Models and real runs that many tests read: each is described or measured once a process."""

from __future__ import annotations

from functools import cache

from explorer.engine.bench.measure import measure, measure_pair
from explorer.engine.model.describe import describe
from explorer.record import Measurement, ModelGraph, ModelRef, Policy, RunSpec
from tests.engine.tiny_nets import ref

BLOCKS = [f"blocks.{i}" for i in range(4)]
GPT = ref("gpt", width=64, length=64)
"""A GPT of four blocks."""

SMALL: dict[str, dict[str, int]] = {
    "gpt": {"n_layers": 2, "width": 32, "length": 32, "batch": 2, "vocabulary": 64},
    "mlp": {"n_layers": 4, "width": 32, "batch": 256},
    "vit": {"n_layers": 2, "width": 32, "side": 32, "patch": 4, "batch": 2},
    "resnet": {"width": 8, "blocks_per_stage": 2, "n_stages": 2, "side": 16, "batch": 4},
}
"""Arguments of sample models that run in milliseconds. Layers and rows are alike, so predictions are as hard."""


def sample(name: str, **arguments: int) -> ModelRef:
    """A sample model; without arguments in the sizes of SMALL, if it has some there."""
    return ModelRef(target=f"sample_models/{name}.py", size="small", arguments=dict(arguments or SMALL.get(name, {})))


@cache
def sample_run(name: str, **arguments: int) -> tuple[ModelGraph, Measurement]:
    """Graph and untimed run of `sample(name, ...)` with everything kept."""
    model = sample(name, **arguments)
    return describe(model), measure(RunSpec(model=model, n_repeats=0))


@cache
def gpt_pair() -> tuple[Measurement, Measurement]:
    """GPT with everything kept, and with all its blocks recomputed, timed in turns."""
    baseline = RunSpec(model=GPT, n_repeats=3)
    return measure_pair(baseline, RunSpec(model=GPT, n_repeats=3, policy=Policy.recompute(BLOCKS)))
