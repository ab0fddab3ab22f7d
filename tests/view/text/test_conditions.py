"""Conditions of a run in words: what is not as it usually is, and nothing else."""

from __future__ import annotations

import msgspec

from explorer.record import ModelRef, RunSpec
from explorer.view.text.runs import conditions


def test_conditions_say_what_is_not_usual_and_nothing_else() -> None:
    spec = RunSpec(model=ModelRef(target="m.py", size="small", arguments={"n": 4}))
    assert conditions(spec) == "small, n=4, cpu"
    other = msgspec.structs.replace(
        spec, autocast="bfloat16", optimizer="sgd", momentum=0.9, frozen=("a",), n_threads=2
    )
    assert conditions(other) == "small, n=4, cpu, bfloat16 autocast, optimizer sgd, momentum 0.9, frozen a, 2 threads"
