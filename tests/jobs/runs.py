"""Runs to keep, small ones and ones that no compression makes small."""

from __future__ import annotations

import os

from explorer.record.allocations import ROLES, Allocations, PhaseSpan
from explorer.record.base import column
from explorer.record.graph import ModelRef
from explorer.record.measurement import Environment, Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec


def measured(target: str = "sample_models/gpt.py", *blocks: str, n: int = 3) -> Measurement:
    saved = ROLES.index("saved activation")
    log = Allocations(
        n_ticks=n,
        n_bytes=column(range(1, n + 1)),
        born=column(range(1, n + 1)),
        died=column([n + 1] * n),
        role=column([saved] * n),
        block=column([0] * n),
        op=column([0] * n),
        blocks=("",),
        ops=("aten.mm",),
        time_ns=column(),
    )
    environment = Environment(
        device="cpu", device_name="test", torch_version="2.13.0", python_version="3.11", platform="test", n_threads=1
    )
    return Measurement(
        spec=RunSpec(model=ModelRef(target=target, size="small"), policy=Policy.recompute(blocks)),
        environment=environment,
        allocations=log,
        phases=(PhaseSpan(phase="forward", block="", first_tick=0, end_tick=n + 1),),
    )


def noisy() -> Measurement:
    """A record that zlib cannot make small."""
    record = measured(n=20_000)
    assert record.allocations is not None
    record.allocations.time_ns.extend(int.from_bytes(os.urandom(7), "little") for _ in range(20_000))
    return record
