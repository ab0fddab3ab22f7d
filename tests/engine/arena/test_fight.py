"""A bout on real steps: the same figures as a comparison, wrong gradients shown as wrong, refusals as results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from explorer.engine.arena.fight import fight
from explorer.engine.compare.compare import compare
from explorer.engine.device.apart import apart
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.arena import Bout, Ground
from explorer.record.progress import Progress
from tests.engine.tiny_nets import ref

MIB = 1024**2
GROUND = Ground(peak_bytes=MIB, saved_bytes=MIB // 2, is_measured=True)


def spec(factory: str = "gpt", **arguments: Any) -> RunSpec:
    return RunSpec(model=ref(factory, **arguments), n_repeats=3)


def fought(spec: RunSpec, policy: Policy) -> Bout:
    progresses: list[Progress] = []
    bout = fight(spec, Bout(rival="greedy", policy=policy), GROUND, progresses.append)
    assert progresses
    return bout


def test_a_bout_says_what_a_comparison_says() -> None:
    case, policy = spec(), Policy.recompute(["blocks.0", "blocks.2"])
    bout = fought(case, policy)
    known = compare(case, msgspec.structs.replace(case, policy=policy))
    assert bout.step_peak_bytes == known.candidate.peaks.alone_peak_bytes
    assert bout.verdict == known.verdict == "bitwise equal" and not bout.worst
    assert bout.failure is None and not bout.step.ms, "policies take turns, see in_turns"


def test_gradients_that_are_wrong_are_called_wrong() -> None:
    """A recompute that draws other masks: what a planner without the generators' state would do."""
    bout = fought(spec(dropout=0.5), Policy.recompute(["blocks.0"], preserve_rng_state=False))
    assert bout.verdict == "different" and bout.worst and bout.ran


def test_state_that_moves_twice_is_told_from_equal_gradients() -> None:
    model = ModelRef(target="sample_models/resnet.py", size="small", arguments={"batch": 2})
    case = RunSpec(model=model, n_repeats=0)
    bout = fought(case, Policy.recompute(["blocks.0"], running_stats="every_forward"))
    assert bout.verdict == "state moved" and "blocks.0" in bout.worst


@pytest.mark.slow
def test_where_keep_all_does_not_fit_the_rest_still_runs() -> None:
    """No verdict and no ratio, and it says so. In processes of their own: memory that was freed here counts as had."""
    case = RunSpec(model=ref("wide", mib=1, depth=6), n_repeats=1, memory_limit_bytes=40 * MIB)

    def apart_fought(policy: Policy) -> Bout:
        bout = Bout(rival="greedy", policy=policy)
        result = apart(fight, case, bout, GROUND, report=lambda progress: None, what="fought")
        assert result is not None
        return result

    refused = apart_fought(Policy())
    assert refused.failure is not None and refused.failure.kind == "out of memory" and refused.step_peak_bytes is None
    bout = apart_fought(Policy.recompute([str(i) for i in range(6)]))
    assert bout.failure is None and bout.step_peak_bytes is not None, bout.failure
    assert bout.verdict is None and bout.time_ratio is None and "does not fit" in bout.why
