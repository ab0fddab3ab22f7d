"""A step is recorded watched and unwatched, its entries joined with storages; torch's tools draw the same step."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.bench.attribution import watch_releases
from explorer.engine.bench.measure import measure
from explorer.engine.bench.other_tools import draw_autograd
from explorer.engine.bench.recording import record, tracker_of
from explorer.engine.bench.step import Trainee, prepare
from explorer.engine.bench.timeline import RECOMPUTED, SAVED, TEMPORARY, TrackedStep, entries_of, window
from explorer.engine.device.allocator import AllocatorLog, lifetimes
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker
from explorer.errors import BadInput
from explorer.record import ROLES, ModelRef, Policy, RunSpec
from explorer.record.graph import AutogradPictures
from tests.engine.tiny_nets import ref
from tests.zoo import BLOCKS, GPT, gpt_pair


def test_two_instruments_agree_and_costs_of_blocks_add_up() -> None:
    baseline, candidate = gpt_pair()
    for run in (baseline, candidate):
        root, below = run.by_fqn[""], [run.by_fqn[fqn] for fqn in BLOCKS]
        assert run.peaks.alone_peak_bytes == run.step_peak_bytes == root.at_peak_bytes
        assert run.peaks.tracker_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.005)
        assert root.saved_after_forward_bytes == run.saved_after_forward_bytes
        for name in ("saved_after_forward_bytes", "forward_flops"):
            assert getattr(run.by_fqn["blocks"], name) == sum(getattr(cost, name) for cost in below)
    assert {cost.n_recompute for cost in baseline.blocks} == {0}
    assert [candidate.by_fqn[fqn].n_recompute for fqn in (*BLOCKS, "head")] == [1, 1, 1, 1, 0]
    for fqn in BLOCKS:
        few, many = candidate.by_fqn[fqn], baseline.by_fqn[fqn]
        assert few.saved_after_forward_bytes < 0.3 * many.saved_after_forward_bytes


def test_a_layer_that_steps_aside_when_watched_is_told_or_agrees() -> None:
    run = measure(RunSpec(model=ref("attention"), n_repeats=0))
    apart = abs(run.step_peak_bytes - run.peaks.alone_peak_bytes) / run.peaks.alone_peak_bytes
    sentences = [sentence for sentence in run.warnings if "Being watched" in sentence]
    assert bool(sentences) == (apart > 0.005)
    if sentences:
        assert f"{run.peaks.alone_peak_bytes:,}" in sentences[0] and f"{run.step_peak_bytes:,}" in sentences[0]


def test_layers_left_out_by_chance_are_the_same_in_every_step() -> None:
    """Watched and unwatched step draw the same layers, to the byte. The forward that shows releases draws nothing."""
    run = measure(RunSpec(model=ref("dropped_layers"), n_repeats=0, seed=1))
    assert run.step_peak_bytes == run.peaks.alone_peak_bytes
    assert not [sentence for sentence in run.warnings if "Being watched" in sentence]
    trainee = prepare(RunSpec(model=ref("dropped_layers")))
    before = torch.get_rng_state()
    watched = watch_releases(trainee, tracker_of(trainee))
    assert watched is not None and torch.equal(torch.get_rng_state(), before)
    trainee.model(trainee.inputs)
    assert not torch.equal(torch.get_rng_state(), before), "the model draws"


def test_what_a_recording_leaves_behind_does_not_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a baseline's parameters and gradients would lie in the candidate's total."""
    kept: list[weakref.ref[torch.nn.Module]] = []

    def prepared(*arguments: object) -> Trainee:
        trainee = prepare(*arguments)  # type: ignore[arg-type]
        kept.append(weakref.ref(trainee.model))
        return trainee

    monkeypatch.setattr("explorer.engine.bench.recording.prepare", prepared)
    spec = RunSpec(model=GPT, policy=Policy.recompute(BLOCKS))
    run = record(spec, load(spec.model), lambda progress: None)
    gc.collect()
    assert run.allocations is not None
    assert kept and kept[0]() is None


def test_early_stop_skips_the_last_product() -> None:
    """Nothing behind the last Linear saves anything when dropout is 0, so its product is not needed again."""
    model = ref("gpt", dropout=0.0)
    skip = measure(RunSpec(model=model, n_repeats=0, policy=Policy.recompute(BLOCKS)))
    last_linear = 2 * 4 * 32 * (4 * 32) * 32
    assert [skip.by_fqn[fqn].skipped_flops for fqn in BLOCKS] == [last_linear] * 4
    assert skip.by_fqn[""].skipped_flops == 4 * last_linear
    assert skip.recompute_flops == sum(skip.by_fqn[fqn].forward_flops for fqn in BLOCKS) - 4 * last_linear
    whole = measure(RunSpec(model=model, n_repeats=0, policy=Policy.recompute(BLOCKS, early_stop=False)))
    assert whole.by_fqn[""].skipped_flops == 0


def test_buckets_of_ddp_are_named() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(3, 5))
        model(torch.ones(2, 3)).sum().backward()
        tracker = Tracker(model, torch.device("cpu"), [])
        with tracker:
            tracker.on_phase("forward")
            model(torch.ones(2, 3))  # the second forward: buckets are built anew
            seen = tracker.storages
            # Ranks agree on sizes in lists of one int32, which gloo's threads hold a moment after the forward.
            seen.settle()
            while NONE in [died for n_bytes, died in zip(seen.n_bytes, seen.died_ns) if n_bytes == 4]:
                time.sleep(0.001)
                seen.settle()
        assert 4 in seen.n_bytes
        bucket = ROLES.index("gradient bucket")
        assert sum(n for n, role in zip(seen.n_bytes, seen.role) if role == bucket) == (3 * 5 + 5) * 4
    finally:
        distributed.destroy_process_group()


DRAWN = ModelRef(target="sample_models/gpt.py", arguments={"n_layers": 2, "width": 16, "length": 8, "batch": 2})


def drawn(block: str, **options: Any) -> AutogradPictures:
    return draw_autograd(RunSpec(model=DRAWN, policy=Policy.recompute((), **options)), block)


def test_non_reentrant_empties_the_nodes_and_reentrant_replaces_them_by_one() -> None:
    pictures, reentrant = drawn("blocks.0"), drawn("blocks.0", use_reentrant=True)
    kept, recomputed = pictures.kept, pictures.recomputed
    assert pictures.block == "blocks.0" and kept.dot.startswith("digraph")
    assert recomputed.n_nodes == kept.n_nodes > 30
    assert recomputed.saved_bytes < kept.saved_bytes / 5 and recomputed.n_saved_tensors < kept.n_saved_tensors
    for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.down.bias", "input 0"):
        assert name in kept.dot and name in recomputed.dot
    assert "CheckpointFunctionBackward" in reentrant.recomputed.dot
    assert "CheckpointFunctionBackward" not in reentrant.kept.dot
    assert reentrant.recomputed.n_nodes < reentrant.kept.n_nodes / 5


@pytest.mark.parametrize(("block", "words"), [("block.0", "no block 'block.0'"), ("blocks", "never called")])
def test_what_cannot_be_drawn(block: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        drawn(block)


N = 1009
"""Elements of each activation; nothing else in the step has as many."""


def tracked(policy: Policy) -> TrackedStep:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Tanh())
    x = torch.ones(N, requires_grad=True)
    tracker = Tracker(model, torch.device("cpu"), [])
    with apply_policy(model, policy), tracker:
        tracker.on_phase("forward")
        loss = model(x).sum()
        tracker.on_phase("backward")
        loss.backward()
    return TrackedStep(tracker)


def roles_of(step: TrackedStep) -> list[int]:
    """Roles of the activations, in order of birth."""
    return [int(role) for role, n_bytes in zip(step.roles(), step.n_bytes) if n_bytes == 4 * N]


def test_roles_follow_from_lifetime_and_phase() -> None:
    """What lives beyond forward is saved, what backward makes is temporary, what runs again is recomputed."""
    kept, recomputed = roles_of(tracked(Policy())), roles_of(tracked(Policy.recompute(["0"])))
    assert kept[:3] == [SAVED] * 3 and set(kept[3:]) == {TEMPORARY}
    assert recomputed[:3] == [TEMPORARY, TEMPORARY, SAVED], "tanh saves what it returns"
    assert recomputed.count(RECOMPUTED) == 2


def test_births_come_before_deaths_and_the_peak_is_their_running_sum() -> None:
    step = tracked(Policy())
    born, died = step.turn(of_death=False), step.turn(of_death=True)
    assert (born < died).all() and born.max() < len(step.turns)
    alive = [step.n_bytes[(born <= turn) & (died > turn)].sum() for turn in range(len(step.turns))]
    assert step.peak_bytes(np.ones(len(step.n_bytes), dtype=bool)) == max(alive)
    assert step.peak_bytes(np.zeros(len(step.n_bytes), dtype=bool)) == 0


SKEW_NS = 5_000_000


def log_of(*events: tuple[int, int, int], base_bytes: int | None = None) -> AllocatorLog:
    """(microsecond, pointer, bytes) an event."""
    columns = np.array(events, dtype=np.int64).reshape(-1, 3)
    return AllocatorLog(
        time_ns=columns[:, 0] * 1000 + SKEW_NS, pointer=columns[:, 1], n_bytes=columns[:, 2], base_bytes=base_bytes
    )


def seen(*storages: tuple[int, int, int, int], n_before: int = 0, collective: tuple[int, int] | None = None) -> Any:
    """(pointer, bytes, microsecond seen, microsecond died or NONE) a storage; first and last microsecond."""
    pointer, n_bytes, seen_us, died_us = np.array(storages, dtype=np.int64).reshape(-1, 4).T
    died_ns = np.where(died_us == NONE, NONE, died_us * 1000)
    return SimpleNamespace(
        pointer=pointer, n_bytes=n_bytes, seen_ns=seen_us * 1000, died_ns=died_ns, n_before_step=n_before,
        collectives_ns=np.array([collective or ()], dtype=np.int64).reshape(-1, 2).T * 1000,
    )  # fmt: skip


REUSED = ((10, 1, 64), (12, 2, 32), (30, 3, 8), (40, 1, 64), (50, 2, 32))
JOINED: dict[str, tuple[AllocatorLog, Any, list[tuple[int, int, int, int]]]] = {
    "an address handed out twice": (
        log_of((10, 1, 64), (20, 1, -64), (30, 1, 64), (40, 2, 32)), seen((1, 64, 35, NONE)),
        [(64, 1, 2, NONE), (64, 3, 5, 0), (32, 4, 5, NONE)],
    ),
    "another size": (log_of((10, 1, 64)), seen((1, 32, 15, NONE)), [(64, 1, 2, NONE)]),
    "before its time": (log_of((10, 1, 64)), seen((1, 64, 5, NONE)), [(64, 1, 2, NONE)]),
    "two clocks agree to a microsecond": (log_of((10, 1, 64)), seen((1, 64, 9, NONE)), [(64, 1, 2, 0)]),
    "on the CPU the tracker has the death of an older storage": (
        log_of((10, 1, 64)), seen((7, 100, 0, 20), (8, 200, 0, NONE), n_before=2),
        [(100, 0, 2, 0), (200, 0, 3, 1), (64, 1, 3, NONE)],
    ),
    "frees that the log lacks": (
        log_of(*REUSED), seen((1, 64, 15, 25)),
        [(64, 1, 4, 0), (32, 2, 5, NONE), (8, 3, 6, NONE), (64, 4, 6, NONE), (32, 5, 6, NONE)],
    ),
    # A named block dies with its storage, gloo's own copy with the collective.
    "frees by the thread of a collective": (
        log_of(*REUSED), seen((1, 64, 15, 25), collective=(11, 20)),
        [(64, 1, 4, 0), (32, 2, 3, NONE), (8, 5, 8, NONE), (64, 6, 8, NONE), (32, 7, 8, NONE)],
    ),
    "on a GPU the rest of the base has no owner": (
        log_of((10, 7, -100), (20, 9, -30), base_bytes=500), seen((7, 100, 0, NONE), (8, 200, 0, NONE), n_before=2),
        [(100, 0, 1, 0), (200, 0, 3, 1), (30, 0, 2, NONE), (170, 0, 3, NONE)],
    ),
}  # fmt: skip
"""Log, storages, and the rows (bytes, born, died, storage) of the timeline."""


@pytest.mark.parametrize("name", JOINED)
def test_blocks_are_joined_with_storages(name: str) -> None:
    log, storages, rows = JOINED[name]
    entries, _ = entries_of(log, lifetimes(log), storages, SKEW_NS)
    assert list(zip(*(c.tolist() for c in (entries.n_bytes, entries.born, entries.died, entries.storage)))) == rows


def test_a_block_of_cublas_is_known_by_size_and_life() -> None:
    """64 and 8 are the sizes. A tensor, a block that is freed and a second 8 beside one 64 are no workspaces."""
    log = replace(
        log_of((10, 1, 64), (20, 2, 64), (30, 2, -64), (40, 3, 64), (50, 4, 8), (60, 5, 8), base_bytes=64),
        older_blocks=((7, 64),), workspace_sizes=(64, 8),
    )  # fmt: skip
    storages = seen((7, 64, 0, NONE), (3, 64, 45, NONE), n_before=1)
    entries, _ = entries_of(log, lifetimes(log), storages, SKEW_NS)
    rows = zip(entries.n_bytes.tolist(), entries.born.tolist(), entries.is_workspace.tolist())
    in_step = [(64, 1, True), (64, 2, False), (64, 4, False), (8, 5, True), (8, 6, False)]
    assert list(rows) == [(64, 0, False), *in_step]
    longer = replace(log, older_blocks=((7, 64), (8, 64), (9, 60)), base_bytes=188)
    entries, _ = entries_of(longer, lifetimes(longer), storages, SKEW_NS)
    assert entries.is_workspace.tolist() == [False, True, False, True, False, False, True, True]
    assert entries.n_bytes.tolist()[:3] == [64, 64, 60]


def test_ticks_are_on_the_trackers_clock_and_earlier_events_go_into_the_base() -> None:
    log = log_of((10, 1, 64), (20, 1, -64), (30, 2, 8), (40, 3, 16), base_bytes=1000)
    step = window(log, 15_000 + SKEW_NS, 35_000 + SKEW_NS)
    assert (step.n_bytes.tolist(), step.base_bytes) == ([-64, 8], 1064)
    log = log_of((10, 1, 64), (20, 1, -64))
    assert window(log, 15_000 + SKEW_NS, 35_000 + SKEW_NS).base_bytes is None
    entries, tick_ns = entries_of(log, lifetimes(log), seen(), SKEW_NS)
    assert tick_ns.tolist() == [10_000, 20_000] and entries.time_ns.tolist() == [10_000]
