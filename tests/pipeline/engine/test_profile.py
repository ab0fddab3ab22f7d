"""The price list: what it measures, which stretches are equal, and how near a prediction comes to measured peaks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from explorer.engine.bench.step import host_of
from explorer.engine.policy.offload import HOST
from explorer.pipeline.engine.build import build
from explorer.pipeline.engine.in_process import run_pass
from explorer.pipeline.engine.profile import N_TIMED, profile_blocks
from explorer.pipeline.engine.run import run_pipeline
from explorer.pipeline.engine.stage_bench import N_OF_A_KIND, survey
from explorer.pipeline.plan.cuts import left_out
from explorer.pipeline.plan.schedules import SCHEDULES
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import PipelineProfile
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import RunSpec
from tests.pipeline.engine.pipeline_nets import GATED, LANGUAGE, QUIET, RETURNING
from tests.pipeline.engine.pipeline_runs import PROFILED, WIDE, profile_of, spec

TOLERANCE = 0.025 if torch.__version__ >= "2.13" else 0.07
"""As a share of a rank's peak."""


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For prices whose times nothing reads."""
    monkeypatch.setattr("explorer.pipeline.engine.profile.N_TIMED", 1)


@pytest.mark.parametrize(("net", "schedule", "every"), [
    *(("language", schedule, 2) for schedule in SCHEDULES if not SCHEDULES[schedule].splits_backward),
    ("carrying", "1F1B", 1),
    *((net, "1F1B", 0) for net in PROFILED),
])  # fmt: skip
def test_peaks_by_rank_are_those_of_the_run(net: str, schedule: str, every: int) -> None:
    policy = Policy.recompute(PROFILED[net][::every]) if every else KEEP_ALL
    n_stages = 3 if schedule in ("GPipe", "1F1B") else 4
    plan = spec(net, PROFILED[net], n_stages, policy, arguments=WIDE, schedule=schedule)
    shares_off = off(profile_of(net), plan)
    assert max(map(abs, shares_off)) < TOLERANCE, shares_off


def off(profiled: PipelineProfile, plan: RunSpec) -> list[float]:
    """By rank, how far the predicted peak is from the measured one."""
    pipeline = build(plan)
    with host_of(plan.policy):
        trace = run_pass(pipeline, memory=True)
    measured = trace.memory()
    predicted = predict(profiled, plan.plan, plan.policy).memory
    return [(p.peak_bytes or 0) / (m.peak_bytes or 1) - 1 for p, m in zip(predicted, measured, strict=True)]


def test_blocks_that_allocate_nothing_have_a_price(timed_once: None) -> None:
    plans = [spec("quiet", QUIET, 3, Policy.recompute(recomputed)) for recomputed in ((), ("0", "4", "5", "6"))]
    profile = profile_blocks(plans[0], tuple((fqn,) for fqn in QUIET), n_microbatches=4)
    assert profile.blocks[2].kept.saved_bytes == profile.blocks[3].kept.saved_bytes == 0
    # Work in place overwrites what a checkpoint would start from again.
    assert profile.blocks[1].recomputed.recompute_ms == 0.0
    assert max(abs(share) for plan in plans for share in off(profile, plan)) < 0.01


def test_what_a_model_returns_is_held_while_its_last_blocks_run_again(timed_once: None) -> None:
    plan = spec("returning", RETURNING, 2, Policy.recompute(RETURNING[:4]), schedule="1F1B")
    profile = profile_blocks(plan, tuple((fqn,) for fqn in RETURNING), n_microbatches=4)
    assert max(map(abs, off(profile, plan))) < 0.01


def test_what_saves_operators_or_offloads_is_priced_as_it_is(timed_once: None) -> None:
    """Half of the equal blocks save operators and half offload, so that each is priced by itself."""
    save = {"action": "save_ops", "save_ops": ("aten.addmm.default",)}
    looks = (save, save, {"action": "offload"}, {"action": "offload"})
    units = tuple(Unit(blocks=(fqn,), **look) for fqn, look in zip(LANGUAGE[1:5], looks))  # type: ignore[arg-type]
    plan = spec("language", LANGUAGE, 3, Policy(units=units), arguments=WIDE, schedule="1F1B")
    profile = profile_blocks(plan, tuple((fqn,) for fqn in LANGUAGE), n_microbatches=4)
    too_high = off(profile, plan)
    assert too_high[0] < TOLERANCE and min(too_high) >= 0 and max(too_high) < 0.07
    assert plan.plan is not None and f"one by one ({LANGUAGE[3]}, {LANGUAGE[4]})" in left_out(plan.plan, plan.policy)
    first, second, third, _ = (block for block in profile.blocks if block.chosen is not None)
    assert first.chosen == second.chosen != third.chosen
    assert first.chosen is not None and first.chosen.saved_bytes > first.recomputed.saved_bytes
    assert third.chosen is not None and third.chosen.saved_bytes < third.kept.saved_bytes / 4


def test_a_run_with_offloaded_blocks_moves_them() -> None:
    units = tuple(Unit(blocks=(fqn,), action="offload") for fqn in LANGUAGE[1:5])
    kept, moved = (run_pipeline(spec("language", LANGUAGE, 3, Policy(units=some))) for some in ((), units))
    assert all(shares.splitting.bitwise and shares.recompute.bitwise for shares in moved.gradients)
    for before, after in zip(kept.memory[:2], moved.memory[:2], strict=True):
        assert before.peak_bytes is not None and after.peak_bytes is not None
        assert after.peak_bytes < 0.9 * before.peak_bytes
    assert HOST.stand_in(torch.ones(1)) is None


def test_what_goes_through_a_block_is_no_bytes_of_its_own() -> None:
    one = 2 * 32 * 64 * 4
    passed = [(block.output_bytes, block.passed_bytes) for block in profile_of("carrying").blocks]
    # The last of the blocks also joins what it made and what came through: one tensor of its own.
    assert passed == [(one, 0), (2 * one, one), (2 * one, one), (2 * one, one), (2 * one, 0), (one, 0), (0, 0)]


def test_a_split_backward_runs_without_a_prediction() -> None:
    plan = spec("language", LANGUAGE, 4, arguments=WIDE, schedule="ZBVZeroBubble")
    run = run_pipeline(plan, profile=profile_of("language"))
    assert run.failure is None and run.timing is not None and run.memory
    assert run.predicted is None and "predicted_makespan_ms" in run.headlines()


DEEP = ("tokens", *(f"blocks.{k}" for k in range(8)), "head")


@pytest.mark.parametrize(("net", "blocks", "kinds"), [
    ("language", LANGUAGE, (0, 1, 1, 1, 4, 5)),  # the norm behind the last block is part of its stretch
    ("gated", GATED, (0, 1, 2, 1, 2, 5)),  # the last one sends to nobody
    ("quiet", QUIET, tuple(range(len(QUIET)))),
])  # fmt: skip
def test_equal_are_those_of_one_make_that_hold_the_same(
    net: str, blocks: tuple[str, ...], kinds: tuple[int, ...]
) -> None:
    pipeline = build(spec(net, blocks, len(blocks), n_microbatches=2))
    surveyed = survey(pipeline, lambda: None)
    assert surveyed.kinds == kinds
    assert surveyed.samples(kinds) == {
        j for j, kind in enumerate(kinds) if sum(other == kind for other in kinds[:j]) < N_OF_A_KIND
    }


def test_equal_blocks_have_one_price_and_most_of_them_are_not_run_for_it() -> None:
    plan = spec("language", DEEP, 2, KEEP_ALL, arguments={"n_blocks": 8})
    n_calls: Counter[str] = Counter()
    seen: list[str] = []
    calls = nn.modules.module.register_module_forward_hook(lambda module, *_: n_calls.update([type(module).__name__]))
    try:
        groups = tuple((fqn,) for fqn in DEEP)
        profile = profile_blocks(plan, groups, lambda one: seen.append(one.what), n_microbatches=4)
    finally:
        calls.remove()
    first, *others = profile.blocks[1:8]
    assert all(block.kept == first.kept and block.recomputed == first.recomputed for block in others)
    assert first.kept.forward_ms > 0
    assert "pricing blocks, kept: 4 kinds of 10" in seen
    # Forwards of two microbatches, of the stretches and of all in one stage, kept and recomputed.
    assert n_calls["Block"] < 2 * 8 * 2 * 2 * N_TIMED
