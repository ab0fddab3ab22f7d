"""Short ways to a RunSpec with a plan, to profiles and tapes, and what every split run must satisfy."""

from __future__ import annotations

import copy
import os
import socket
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from explorer.child_process.forks import at_hand
from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded
from explorer.pipeline.engine import torchrun_rank
from explorer.pipeline.engine.profile import profile_blocks
from explorer.pipeline.engine.run import open_results, run_pipeline
from explorer.pipeline.engine.tape import Tape, record
from explorer.pipeline.plan.export import RESULTS, SPEC_FILE, run_files
from explorer.pipeline.plan.schedules import rows_of
from explorer.pipeline.record.step import PipelineProfile, PipelineRun
from explorer.record.base import from_json, to_json
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec
from tests.pipeline.engine.pipeline_nets import CARRYING, LANGUAGE

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
def _ran(plan_json: bytes) -> PipelineRun:
    return run_pipeline(from_json(plan_json, RunSpec))


def ran(plan: RunSpec) -> PipelineRun:
    """The run of `plan`, made once a process."""
    return _ran(to_json(plan))


NEEDS = ["torch._dynamo", "explorer.pipeline.engine.rank"]


def unpacked(plan: RunSpec, folder: Path) -> Path:
    """The torchrun files, in a folder that was not there when they were written."""
    files = run_files(plan)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def rank_here(folder: str, world: dict[str, str], arguments: Sequence[str]) -> None:
    """Body of the process of one rank that torchrun starts."""
    os.chdir(folder)
    os.environ.update(world)
    sys.argv = list(arguments)
    torchrun_rank.main()


def ran_by_ranks(plan: RunSpec, folder: Path) -> PipelineRun:
    """The run of real ranks, each in a process with the environment that torchrun gives it."""
    packed, n_ranks = unpacked(plan, folder / "packed"), len(rows_of(plan.plan))
    world = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_PORT": free_port()}
    names = {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    arguments = ("torchrun_rank", SPEC_FILE, "--out", RESULTS)
    ranks = [
        at_hand().start(rank_here, str(packed), {**names, "RANK": number, "LOCAL_RANK": number}, arguments, needs=NEEDS)
        for number in map(str, range(n_ranks))
    ]
    for process in ranks:
        process.wait()
        process.close()
    return open_results(plan, packed / RESULTS)


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
