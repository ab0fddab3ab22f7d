"""The attributed timeline: every byte of the allocator has one role and one block, the right ones."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from explorer.engine.bench.attribution import _operators, attribute
from explorer.engine.bench.recording import Recording, record_step, tracker_of
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import AllocatorLog, clock_skew_ns, lifetimes, read_trace, take_probe
from explorer.engine.device.device import CpuDevice
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.storages import NONE
from explorer.record import PHASES, ROLES, Allocations, ModelRef, Policy, RunSpec, Unit
from explorer.record.failure import Failure
from explorer.record.policy import KEEP_ALL
from tests.engine.tiny_nets import ref
from tests.graphs import alive_at
from tests.zoo import BLOCKS

MODES = {
    "keep": KEEP_ALL,
    "all": Policy.recompute(BLOCKS),
    "mixed": Policy.recompute(BLOCKS[::2]),
    "reentrant": Policy.recompute(BLOCKS, use_reentrant=True),
    "nested": Policy.recompute([*BLOCKS, "blocks.1.mlp"]),
}
WIDE = {"width": 64, "length": 64}


def recorded(trainee: Trainee) -> Recording:
    failures: list[Failure] = []
    run = record_step(trainee, CpuDevice(), failures)
    assert not failures, failures
    return run


def warm(model: ModelRef, **options: Any) -> Trainee:
    """A trainee after its first step, without gradients."""
    trainee = prepare(RunSpec(model=model, **options))
    run_step(trainee)
    trainee.model.zero_grad(set_to_none=True)
    return trainee


def run_of(policy: Policy = KEEP_ALL, model: ModelRef | None = None, **options: Any) -> Recording:
    with preserve_global_state():
        return recorded(warm(model or ref("gpt", **WIDE), policy=policy, **options))


@cache
def in_mode(mode: str) -> Recording:
    return run_of(MODES[mode])


def log_of(run: Recording) -> Allocations:
    return run.attribution.allocations


def bytes_by_role(log: Allocations, tick: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for i in alive_at(log, tick):
        total[ROLES[log.role[i]]] += log.n_bytes[i]
    return total


def test_what_a_checkpoint_keeps_of_the_generators_is_saved() -> None:
    """By pencil: torch's generator on the CPU is 5,056 bytes, and each of four checkpoints keeps its state."""

    def saved(run: Recording) -> int:
        border = next(span.end_tick for span in run.attribution.phases if span.phase == "forward") - 1
        return bytes_by_role(log_of(run), border)["saved activation"]

    without = run_of(Policy.recompute(BLOCKS, preserve_rng_state=False))
    assert saved(in_mode("all")) - saved(without) == 4 * 5056


@pytest.mark.parametrize("mode", MODES)
def test_roles_sum_to_the_allocators_own_total_at_every_tick(mode: str) -> None:
    """The right side is a running sum over the raw events, the left side goes role by role."""
    run = in_mode(mode)
    log, raw, tracker = log_of(run), run.log, run.tracker
    inside = (raw.time_ns > tracker.begin_ns) & (raw.time_ns < tracker.end_ns)
    own = AllocatorLog(time_ns=raw.time_ns[inside], pointer=raw.pointer[inside], n_bytes=raw.n_bytes[inside])
    unknown = set(lifetimes(own).older_frees.tolist())
    before = sum(tracker.storages.n_bytes[: tracker.storages.n_before_step])
    raw_total = list(accumulate((n for i, n in enumerate(own.n_bytes.tolist()) if i not in unknown), initial=before))
    by_role = [[0] * (log.n_ticks + 2) for _ in ROLES]
    for size, born, died, role in zip(log.n_bytes, log.born, log.died, log.role):
        by_role[role][born] += size
        by_role[role][died] -= size
    summed = [sum(values) for values in zip(*(accumulate(deltas) for deltas in by_role))][:-1]
    assert summed == raw_total == list(log.held_bytes)
    assert run.attribution.peaks.tracker_peak_bytes == pytest.approx(max(log.held_bytes), rel=0.005), (
        "a third instrument"
    )


def recomputed_in(log: Allocations) -> set[str]:
    """Blocks, down to the second level, with recomputed bytes."""
    recomputed = ROLES.index("recomputed")
    return {
        ".".join(log.blocks[block].split(".")[:2]) for block, role in zip(log.block, log.role) if role == recomputed
    }


@pytest.mark.parametrize("mode", MODES)
def test_chosen_blocks_recompute_bytes_in_phases_without_gaps(mode: str) -> None:
    run = in_mode(mode)
    assert recomputed_in(log_of(run)) == {fqn for fqn in MODES[mode].blocks if fqn.count(".") == 1}
    spans = run.attribution.phases
    assert (spans[0].first_tick, spans[0].phase) == (0, "forward")
    assert (spans[-1].end_tick, spans[-1].phase) == (log_of(run).n_ticks + 1, "optimizer")
    assert all(a.end_tick == b.first_tick for a, b in zip(spans, spans[1:]))
    assert all(span.first_tick < span.end_tick for span in spans)
    assert {span.block for span in spans if span.phase == "recompute"} == set(MODES[mode].blocks)


def test_a_segments_blocks_are_distinct_texts() -> None:
    log = log_of(run_of(Policy(units=(Unit(blocks=("1", "2")),)), ref("chain", width=64)))
    assert {fqn.partition(".")[0] for fqn in recomputed_in(log)} == {"1", "2"}


def test_accumulated_gradients_are_counted_once_and_forwards_repeat() -> None:
    run = run_of(n_accumulation=2, optimizer="none")
    log, total = log_of(run), Counter[str]()
    for size, role in zip(log.n_bytes, log.role):
        total[ROLES[role]] += size
    assert total["gradient"] == total["parameter"] and not total["optimizer state"]
    assert [span.phase for span in run.attribution.phases] == ["forward", "backward"] * 2


def test_a_frozen_block_has_no_gradient() -> None:
    log = log_of(run_of(frozen=("blocks.0",)))
    owners = {log.blocks[block] for block, role in zip(log.block, log.role) if ROLES[role] == "gradient"}
    assert owners and not any(fqn.startswith("blocks.0") for fqn in owners)


def test_an_lstm_has_bytes_inside_its_kernels() -> None:
    log = log_of(run_of(model=ref("lstm", width=64, length=64)))
    inside = [i for i, role in enumerate(log.role) if ROLES[role] == "unattributed" and log.n_bytes[i] > 10_000]
    assert inside
    assert {log.blocks[log.block[i]] for i in inside} == {"layer"}
    assert all("rnn" in log.ops[log.op[i]] for i in inside)


def test_shared_weights_take_the_same_path_with_and_without_the_tracker() -> None:
    """A dispatch mode alone would make autograd add up a shared weight's gradients out of place."""
    with preserve_global_state():
        trainee = warm(ref("shared", width=64), optimizer="none")
        with CpuDevice().recorder() as unwatched:
            run_step(trainee)
        run = recorded(trainee)
    of_weights = [int((log.n_bytes == 64 * 64 * 4).sum()) for log in (unwatched.log, run.log)]
    assert of_weights[0] == of_weights[1] > 0


def test_stale_gradients_are_there_at_the_start_and_their_death_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler loses frees of blocks older than itself: uncorrected the peak would be too high by the gradients."""
    with preserve_global_state():
        trainee = warm(ref("gpt", width=128, batch=1, length=16))
        clean = recorded(trainee)
        with monkeypatch.context() as late:  # as in a loop that clears its gradients inside the step
            late.setattr(trainee.model, "zero_grad", lambda **how: late.undo())
            stale = recorded(trainee)
    log = log_of(stale)
    parameters = bytes_by_role(log, 0)["parameter"]
    assert bytes_by_role(log, 0)["gradient"] == parameters
    assert bytes_by_role(log_of(clean), 0)["gradient"] == 0
    n_stale = sum(ROLES[log.role[i]] == "gradient" for i in alive_at(log, 0))
    assert max(log.held_bytes[n_stale:]) == pytest.approx(max(log_of(clean).held_bytes), rel=0.01)
    assert log.held_bytes[-1] == pytest.approx(log_of(clean).held_bytes[-1], rel=0.01)


def test_an_allocation_nobody_tagged_keeps_block_and_phase() -> None:
    """The same recording, told to a tracker whose storages are forgotten."""
    with preserve_global_state():
        trainee = warm(ref("chain", width=64))
        tracker = tracker_of(trainee)
        with CpuDevice().recorder() as recorder, tracker:
            run_step(trainee, tracker.on_phase)
    for i in range(tracker.storages.n_before_step, len(tracker.storages.pointer)):
        tracker.storages.pointer[i] = 0
    attribution = attribute(recorder.log, tracker, 0)
    log, end = attribution.allocations, next(span.end_tick for span in attribution.phases if span.phase == "forward")
    new = [i for i, born in enumerate(log.born) if born]
    kept = {i for i in new if log.born[i] < end <= log.died[i] <= log.n_ticks}
    assert kept
    for i in new:  # what forward leaves for backward is saved, whoever made it
        assert ROLES[log.role[i]] == ("saved activation" if i in kept else "unattributed")
    assert {log.blocks[log.block[i]] for i in new} >= {"0.0", "3.1"}
    assert {span.phase for span in attribution.phases} <= set(PHASES)


def as_cuda_says_it(log: AllocatorLog, base_bytes: int, skew_ns: int) -> AllocatorLog:
    """A CPU's recording in the words of CUDA's history: whole microseconds of another clock, two entries a free."""
    older = set(lifetimes(log).older_frees.tolist())
    trace: list[dict[str, Any]] = []
    for i, (time_ns, pointer, n_bytes) in enumerate(
        zip(*(c.tolist() for c in (log.time_ns, log.pointer, log.n_bytes)))
    ):
        entry = {"addr": pointer, "size": abs(n_bytes), "time_us": (time_ns + skew_ns) // 1000}
        if n_bytes > 0:
            trace.append({"action": "alloc", **entry})
        elif i not in older:
            trace += [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]
    grown = int(log.n_bytes[[i for i in range(len(log.n_bytes)) if i not in older]].sum())
    counters = [
        f"{kind}_bytes.all.{when}" for kind in ("requested", "allocated", "reserved") for when in ("current", "peak")
    ]
    before = dict.fromkeys(counters, base_bytes)
    return read_trace(
        {"device_traces": [trace], "segments": []}, 0, before, dict.fromkeys(counters, base_bytes + grown)
    )


def test_a_clock_of_whole_microseconds_far_from_ours_attributes_alike() -> None:
    with preserve_global_state():
        trainee = warm(ref("gpt", **WIDE), policy=MODES["mixed"])
        tracker = tracker_of(trainee)
        with CpuDevice().recorder() as recorder:
            probes = [take_probe(trainee.device)]
            with tracker:
                run_step(trainee, tracker.on_phase)
            probes.append(take_probe(trainee.device, number=1))
    theirs = recorder.log
    ours = as_cuda_says_it(theirs, sum(tracker.storages.n_bytes[: tracker.storages.n_before_step]), -3_123_456_789)
    assert ours.is_complete
    cpu, cuda = (attribute(log, tracker, clock_skew_ns(log, probes)) for log in (theirs, ours))
    assert cuda.allocations.held_bytes == cpu.allocations.held_bytes
    assert list(cuda.allocations.role) == list(cpu.allocations.role)
    tagged = [i for i, role in enumerate(cpu.allocations.role) if ROLES[role] != "unattributed"]  # others go by time
    assert [cuda.allocations.block[i] for i in tagged] == [cpu.allocations.block[i] for i in tagged]
    assert len(tagged) > 100


def test_an_event_of_a_coarse_clock_belongs_to_the_operator_it_fell_into() -> None:
    """Whole microseconds may put what an operator takes before its beginning or behind its end, and no further."""

    def operator_at(time_ns: int, grain_ns: int) -> int:
        tracker = SimpleNamespace(
            n_ops=2, op_first_ns=np.array([1000, 9000]), op_last_ns=np.array([5000, 9900]), made_by=np.array([0])
        )
        entries = SimpleNamespace(storage=np.array([NONE]), time_ns=np.array([time_ns]))
        return int(_operators(entries, tracker, grain_ns)[0])  # type: ignore[arg-type]

    assert [operator_at(t, 0) for t in (999, 1000, 5000, 5001, 8999, 9000)] == [NONE, 0, 0, NONE, NONE, 1]
    assert [operator_at(t, 1000) for t in (500, 5500, 8500, 10_500)] == [0, 0, 1, 1]
    assert [operator_at(t, 1000) for t in (7000, -500, 11_000)] == [NONE, NONE, NONE]
    assert operator_at(20_000, 0) == NONE
