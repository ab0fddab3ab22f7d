"""What was planned below a cap, on real ranks: none of them holds more."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.profile import profile_blocks
from explorer.engine.pipeline.run import run_pipeline
from explorer.plan.pipeline.cuts import atoms
from explorer.plan.planners.joint import joint_plan, once_more
from explorer.record.pipeline_run import fullest_bytes
from explorer.record.plan import CapWish
from tests.engine.pipeline.plans import spec

DEEP = ("tokens", *(f"blocks.{k}" for k in range(6)), "head")


@pytest.mark.slow
def test_a_tight_cap_is_kept_by_real_ranks() -> None:
    asked = spec("language", DEEP, 2, schedule="1F1B", arguments={"n_blocks": 6, "width": 64, "length": 32})
    assert asked.plan is not None
    graph = describe(asked.model)
    profile = profile_blocks(asked, atoms(graph), n_microbatches=4)
    free = joint_plan(profile, graph, CapWish(asked=asked.plan, cap_bytes=2**40, n_microbatches=4))
    wish = CapWish(asked=asked.plan, cap_bytes=int(0.75 * max(free.rank_bytes)), n_microbatches=4)
    held = []
    for _ in range(2):  # a forecast that was too low is corrected by what the run held
        joint = joint_plan(profile, graph, wish if not held else once_more(wish, held[-1]))
        assert joint.policy.units
        run = run_pipeline(msgspec.structs.replace(asked, plan=joint.plan, policy=joint.policy), "procs")
        assert run.failure is None, run.failure
        assert not run.moved
        held.append(fullest_bytes(run.memory))
        assert max(joint.rank_bytes) == pytest.approx(held[-1], rel=0.05)
        if held[-1] <= wish.cap_bytes:
            break
    assert held[-1] <= wish.cap_bytes < max(free.rank_bytes)
