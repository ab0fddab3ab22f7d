"""A pipelined run: causes of differences, and real ranks of a plan below a cap."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.build import build
from explorer.engine.pipeline.in_process import run_pass
from explorer.engine.pipeline.profile import profile_blocks
from explorer.plan.pipeline.cuts import atoms
from explorer.plan.planners.joint import joint_plan, lowered_cap
from explorer.record.pipeline_run import fullest_bytes
from explorer.record.plan import CapWish
from explorer.record.policy import Policy
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.pipeline_runs import SOME, ran, spec

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
        joint = joint_plan(profile, graph, wish if not held else lowered_cap(wish, held[-1]))
        assert joint.policy.units
        run = ran(msgspec.structs.replace(asked, plan=joint.plan, policy=joint.policy), "procs")
        assert run.failure is None, run.failure
        assert not run.moved
        held.append(fullest_bytes(run.memory))
        assert max(joint.rank_bytes) == pytest.approx(held[-1], rel=0.05)
        if held[-1] <= wish.cap_bytes:
            break
    assert held[-1] <= wish.cap_bytes < max(free.rank_bytes)


def test_tied_weights_are_summed_and_named() -> None:
    run = ran(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    tied = next(s for s in run.gradients if len(s.stages) > 1)
    assert (tied.name, tied.stages) == ("tokens.weight", (0, 2))
    assert tied.splitting.relative_norm is not None
    assert tied.splitting.relative_norm < 1e-6
    assert (tied.splitting.bitwise, tied.splitting.verdict) == (False, "rounding")
    assert all(s.splitting.bitwise for s in run.gradients if s is not tied)
    assert any("tokens.weight" in note for note in run.notes)


def test_a_partial_tied_gradient_would_be_seen() -> None:
    """The test above has teeth: one stage's share alone is far off."""
    pipeline = build(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    run_pass(pipeline)
    (_, first), (_, last) = pipeline.owners["tokens.weight"]
    assert first.data_ptr() == last.data_ptr()
    assert first.grad is not None
    assert last.grad is not None
    whole = pipeline.gradients()["tokens.weight"]
    assert whole is not None
    for part in (first.grad, last.grad):
        assert (part / 4 - whole).norm() > 0.01 * whole.norm()


def test_shares_tell_recompute_from_splitting() -> None:
    """A policy that does not restore the generator is wrong by itself; splitting adds nothing to it."""
    careless = Policy.recompute(LANGUAGE[1:4], preserve_rng_state=False)
    run = ran(spec("language", LANGUAGE, 3, careless))
    assert "different" in {s.recompute.verdict for s in run.gradients}
    kept = ran(spec("language", LANGUAGE, 3, SOME))
    assert all(shares.recompute.bitwise and shares.splitting.bitwise for shares in kept.gradients)
