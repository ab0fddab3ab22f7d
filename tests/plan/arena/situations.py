"""Measured steps of three sample models to plan for, and what a rival chooses there."""

from __future__ import annotations

from functools import cache

from explorer.engine.measure.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import BadInput
from explorer.plan.arena.rival import Situation
from explorer.plan.arena.table import rivals
from explorer.record import ModelRef, Policy, RunSpec

SHARES = (0.6, 0.75, 0.9)


MODELS = {
    "gpt": {"n_layers": 4, "batch": 2},
    "mlp": {},
    "unet": {"batch": 2},
}


@cache
def situation(sample: str) -> Situation:
    model = ModelRef(target=f"sample_models/{sample}.py", size="small", arguments=dict(MODELS[sample]))
    return Situation(measure(RunSpec(model=model, n_repeats=1)), describe(model))


def choice(name: str, sample: str, share: float) -> Policy | None:
    choose, case = rivals()[name].choose, situation(sample)
    assert choose is not None
    try:
        return choose(case, int(share * case.keep_all_bytes))
    except BadInput as error:
        assert error.sentence.endswith(".")
        return None
