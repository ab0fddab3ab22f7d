"""Short ways to a RunSpec with a plan."""

from __future__ import annotations

from pathlib import Path

from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec

NETS = Path(__file__).with_name("pipeline_nets.py")


def spec(
    net: str,
    blocks: tuple[str, ...],
    n_stages: int,
    policy: Policy = KEEP_ALL,
    arguments: dict | None = None,
    **plan: object,
) -> RunSpec:
    """`blocks` cut into `n_stages` of nearly equal length; `plan` are fields of PipelinePlan."""
    starts = [round(j * len(blocks) / n_stages) for j in range(n_stages + 1)]
    stages = tuple(blocks[a:b] for a, b in zip(starts, starts[1:]))
    return RunSpec(
        model=ModelRef(target=f"{NETS}:{net}", arguments=arguments or {}),
        policy=policy,
        plan=PipelinePlan(**{"stages": stages, "n_microbatches": 4, **plan}),  # type: ignore[arg-type]
        optimizer="none",
        time_limit_s=300.0,
    )
