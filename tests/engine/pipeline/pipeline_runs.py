"""Short ways to a RunSpec with a plan, to profiles and tapes, and what every split run must satisfy."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded
from explorer.engine.pipeline.profile import profile_blocks
from explorer.engine.pipeline.run import run_pipeline
from explorer.engine.pipeline.tape import Tape, record
from explorer.record.base import from_json, to_json
from explorer.record.graph import ModelRef
from explorer.record.pipeline import PipelineProfile, PipelineRun
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelineEngine, PipelinePlan, RunSpec
from tests.engine.pipeline.pipeline_nets import CARRYING, LANGUAGE

FILE = Path(__file__).with_name("pipeline_nets.py")
PROFILED = {"language": LANGUAGE, "carrying": CARRYING}
WIDE = {"width": 64, "length": 32}
SOME = Policy.recompute(LANGUAGE[1:4])


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
        model=ModelRef(target=f"{FILE}:{net}", arguments=arguments or {}),
        policy=policy,
        plan=PipelinePlan(**{"stages": stages, "n_microbatches": 4, **plan}),  # type: ignore[arg-type]
        optimizer="none",
        time_limit_s=300.0,
    )


def priced(net: str) -> PipelineProfile:
    """A price list for the four microbatches of these plans."""
    groups = tuple((fqn,) for fqn in PROFILED[net])
    return profile_blocks(spec(net, PROFILED[net], 2, arguments=WIDE), groups, n_microbatches=4)


profile_of = cache(priced)


@cache
def _ran(plan_json: bytes, engine: PipelineEngine) -> PipelineRun:
    return run_pipeline(from_json(plan_json, RunSpec), engine)


def ran(plan: RunSpec, engine: PipelineEngine = "inproc") -> PipelineRun:
    """The run of `plan`, made once a process."""
    return _ran(to_json(plan), engine)


def taped(net: str, chain: tuple[str, ...]) -> tuple[Loaded, Tape]:
    """A net and the tape of its forward."""
    loaded = load(ModelRef(target=f"{FILE}:{net}"))
    return loaded, record(copy.deepcopy(loaded.model), loaded.inputs, chain)


def assert_split_is_exact(run: PipelineRun) -> None:
    """No bit of a gradient or buffer moved by splitting."""
    assert run.failure is None, run.failure
    assert run.gradients
    wrong = {s.name: s.splitting.max_abs for s in run.gradients if not s.splitting.bitwise}
    assert not wrong, f"{len(wrong)} of {len(run.gradients)} gradients moved: {wrong}"
    moved = [s.name for s in run.buffers if not s.splitting.bitwise]
    assert not moved, moved
