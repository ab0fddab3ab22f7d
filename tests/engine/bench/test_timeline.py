"""Entries of the timeline: blocks of the allocator joined with storages, and roles by lifetime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from explorer.engine.bench.timeline import RECOMPUTED, SAVED, TEMPORARY, TrackedStep, as_ints, entries_of, window
from explorer.engine.device.allocator import AllocatorLog, lifetimes
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker
from explorer.record import Policy

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


def test_what_lives_beyond_forward_is_saved_and_what_backward_makes_is_not() -> None:
    roles = roles_of(tracked(Policy()))
    assert roles[:3] == [SAVED] * 3 and set(roles[3:]) == {TEMPORARY}


def test_what_runs_again_is_recomputed() -> None:
    roles = roles_of(tracked(Policy.recompute(["0"])))
    assert roles[:3] == [TEMPORARY, TEMPORARY, SAVED]  # tanh saves what it returns
    assert roles.count(RECOMPUTED) == 2


def test_births_come_before_deaths_and_the_peak_is_their_running_sum() -> None:
    step = tracked(Policy())
    born, died = step.turn(of_death=False), step.turn(of_death=True)
    assert (born < died).all() and born.max() < len(step.turns)
    alive = [step.n_bytes[(born <= turn) & (died > turn)].sum() for turn in range(len(step.turns))]
    assert step.peak_bytes(np.ones(len(step.n_bytes), dtype=bool)) == max(alive)
    assert step.peak_bytes(np.zeros(len(step.n_bytes), dtype=bool)) == 0


def test_a_column_is_read_as_whole_numbers() -> None:
    assert as_ints([1, 2]).dtype == np.int64 and as_ints([]).shape == (0,)


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


def joined(log: AllocatorLog, tracked: Any) -> list[tuple[int, int, int, int]]:
    entries, _ = entries_of(log, lifetimes(log), tracked, SKEW_NS)
    return list(zip(*(c.tolist() for c in (entries.n_bytes, entries.born, entries.died, entries.storage))))


def test_a_place_that_is_handed_out_again_belongs_to_the_storage_seen_in_it() -> None:
    log = log_of((10, 1, 64), (20, 1, -64), (30, 1, 64), (40, 2, 32))
    assert joined(log, seen((1, 64, 35, NONE))) == [(64, 1, 2, NONE), (64, 3, 5, 0), (32, 4, 5, NONE)]


def test_a_storage_of_another_size_or_before_its_time_is_no_match() -> None:
    log = log_of((10, 1, 64))
    assert joined(log, seen((1, 32, 15, NONE))) == [(64, 1, 2, NONE)]
    assert joined(log, seen((1, 64, 5, NONE))) == [(64, 1, 2, NONE)]
    assert joined(log, seen((1, 64, 9, NONE))) == [(64, 1, 2, 0)]  # two clocks agree to a microsecond


def test_on_the_cpu_the_tracker_says_when_an_older_storage_died() -> None:
    log = log_of((10, 1, 64))
    assert joined(log, seen((7, 100, 0, 20), (8, 200, 0, NONE), n_before=2)) == [
        (100, 0, 2, 0), (200, 0, 3, 1), (64, 1, 3, NONE),
    ]  # fmt: skip


def test_a_free_by_the_thread_of_a_collective_is_not_in_the_log() -> None:
    """A named block dies with its storage, gloo's own copy with the collective. Both places are handed out again."""
    log = log_of((10, 1, 64), (12, 2, 32), (30, 3, 8), (40, 1, 64), (50, 2, 32))
    storage = (1, 64, 15, 25)
    assert joined(log, seen(storage))[:2] == [(64, 1, 4, 0), (32, 2, 5, NONE)]
    assert joined(log, seen(storage, collective=(11, 20))) == [
        (64, 1, 4, 0), (32, 2, 3, NONE), (8, 5, 8, NONE), (64, 6, 8, NONE), (32, 7, 8, NONE),
    ]  # fmt: skip


def test_on_a_gpu_the_rest_of_the_base_is_nobodys() -> None:
    log = log_of((10, 7, -100), (20, 9, -30), base_bytes=500)
    assert joined(log, seen((7, 100, 0, NONE), (8, 200, 0, NONE), n_before=2)) == [
        (100, 0, 1, 0), (200, 0, 3, 1), (30, 0, 2, NONE), (170, 0, 3, NONE),
    ]  # fmt: skip


def test_ticks_are_told_on_the_trackers_clock() -> None:
    log = log_of((10, 1, 64), (20, 1, -64))
    entries, tick_ns = entries_of(log, lifetimes(log), seen(), SKEW_NS)
    assert tick_ns.tolist() == [10_000, 20_000] and entries.time_ns.tolist() == [10_000]


def test_what_happened_before_the_step_goes_into_the_base() -> None:
    log = log_of((10, 1, 64), (20, 1, -64), (30, 2, 8), (40, 3, 16), base_bytes=1000)
    step = window(log, 15_000 + SKEW_NS, 35_000 + SKEW_NS)
    assert (step.n_bytes.tolist(), step.base_bytes) == ([-64, 8], 1064)
    assert window(log_of((10, 1, 64)), 15_000 + SKEW_NS, 35_000 + SKEW_NS).base_bytes is None
