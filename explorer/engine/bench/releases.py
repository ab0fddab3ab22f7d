"""The moments at which the code of forward releases its tensors, read in a forward that autograd does not record.

In a step autograd holds the saved tensors until backward, so its timeline cannot show when the code drops them. A
checkpoint runs its blocks without autograd: they free their tensors at just these moments. recording.py nearly does it,
but its step records for autograd.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch
from msgspec.structs import replace

from explorer.engine.bench.step import Trainee, autocast
from explorer.engine.bench.timeline import operators_of
from explorer.engine.model.loaded import call
from explorer.engine.state.rng import RngState
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker
from explorer.record.allocations import PHASES, ROLES
from explorer.record.base import column
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy

Birth = tuple[str, str]
"""Operator and block of a storage. Sizes may differ: tokens of a mixture of experts take other ways."""


def watch_releases(trainee: Trainee, tracker: Tracker) -> Tracker | None:
    """Runs forward without autograd under `tracker`; None if the model raises there, or the policy gives no baseline.

    A model that differentiates in its forward raises. Random numbers are restored; other state of the model is not.
    """
    if not _gives_baseline(trainee.spec.policy):
        return None
    drawn = RngState.capture(trainee.model)
    try:
        with tracker, torch.no_grad(), autocast(trainee):
            for inputs, _ in trainee.microbatches():
                call(trainee.model, inputs)
    except Exception:
        return None
    finally:
        drawn.restore()
    return tracker


def _gives_baseline(policy: Policy) -> bool:
    return not policy.use_reentrant and all(unit.action == "recompute" for unit in policy.units)


def with_releases(run: Measurement, watched: Tracker | None) -> Measurement:
    """`run` with `Allocations.released`, if both forwards made the same tensors in the same order."""
    log = run.allocations
    if watched is None or log is None or not _gives_baseline(run.spec.policy):
        return run
    births, drops = _forward(watched)
    is_forward = np.zeros(log.n_ticks + 2, dtype=bool)
    for span in run.phases:
        if PHASES.index(span.phase) == PHASES.index("forward"):
            is_forward[span.first_tick : span.end_tick] = True
    born, op = np.asarray(log.born), np.asarray(log.op)
    named = np.array([bool(name) for name in log.ops])[op] & (np.asarray(log.role) != ROLES.index("unattributed"))
    entries = np.flatnonzero(named & is_forward[born] & (born > 0))
    entries = entries[np.argsort(born[entries], kind="stable")]
    made = [(log.ops[op[entry]], log.blocks[log.block[entry]]) for entry in entries.tolist()][: len(births)]
    if made != births:  # what the loss makes follows
        return run
    released = np.zeros(len(born), dtype=np.int64)
    ends = _ends_of_operators(born, op, entries)
    for birth, last in drops.items():
        released[entries[birth]] = ends[last] + 1
    return replace(run, allocations=replace(log, released=column(released.tolist())))


def _forward(tracker: Tracker) -> tuple[list[Birth], dict[int, int]]:
    """Births in order, and the last birth before the death of each storage that dies before forward ends."""
    storages, ops = tracker.storages, operators_of(tracker)
    numbers: dict[int, int] = {}
    births: list[Birth] = []
    drops: dict[int, int] = {}
    for turn in storages.turns:
        index = abs(turn) - 1
        if turn > 0 and index >= storages.n_before_step and storages.made_by[index] != NONE:
            name, block = ops[storages.made_by[index]][:2].tolist()
            numbers[index] = len(births)
            births.append((tracker.op_names[name], tracker.fqns[block]))
        elif turn < 0 and index in numbers:
            drops[numbers[index]] = len(births) - 1
    return births, drops


def _ends_of_operators(born: np.ndarray, op: np.ndarray, entries: np.ndarray) -> list[int]:
    """The last tick at which the operator of each entry allocates; kernels take temporaries after their result."""
    by_operator: dict[int, list[int]] = defaultdict(list)
    for tick, number in sorted(zip(born.tolist(), op.tolist())):
        by_operator[number].append(tick)
    ticks = {number: np.array(births) for number, births in by_operator.items()}
    borders = [*born[entries].tolist(), 2**62]
    return [
        int(births[np.searchsorted(births, following) - 1])
        for births, (_, following) in zip((ticks[number] for number in op[entries].tolist()), pairwise(borders))
    ]
