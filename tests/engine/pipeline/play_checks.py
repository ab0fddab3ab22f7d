"""What is asked of every split run: no bit moved by splitting."""

from __future__ import annotations

from explorer.record.pipeline_run import PipelineRun
from explorer.record.policy import Policy
from tests.engine.pipeline.pipeline_nets import LANGUAGE

SOME = Policy.recompute(LANGUAGE[1:4])


def assert_split_is_exact(run: PipelineRun) -> None:
    assert run.failure is None, run.failure
    assert run.gradients
    wrong = {s.name: s.splitting.max_abs for s in run.gradients if not s.splitting.bitwise}
    assert not wrong, f"{len(wrong)} of {len(run.gradients)} gradients moved: {wrong}"
    moved = [s.name for s in run.buffers if not s.splitting.bitwise]
    assert not moved, moved
