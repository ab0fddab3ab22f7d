"""The step that follows a recorded one, with the state that the recorded step made.

A training's first step makes state that all later steps hold from their start: moments of AdamW, copies of weights for
an average, gradients that are zeroed in place. Forecasts, plans, texts and cards are about a training, so they read
the timeline of `next_step`. A step that made nothing new is its own next step, the same object.

    first step     parameters          │ forward │ backward │ optimizer makes state │
    next step      parameters + state  │ forward │ backward │ optimizer             │

What the step makes and leaves in memory goes on in one of four ways:
1. It takes the place of an equal allocation that the step freed, as in every later step.
2. State that was made by or after the optimizer's step is there from the next step's start, and is not made again. So
   are the workspaces that cuBLAS took for its first products.
3. A tensor from before the optimizer's step is a variable. The old value lives until the next step makes the new one.
4. Gradients live until `zero_grad`. A loop that zeroes them in place holds them from start to end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from explorer.plan.memory.ledger import Bytes, array_of
from explorer.record.allocations import RANK_ROLES, ROLES, Allocations, Role
from explorer.record.base import Column, column
from explorer.record.measurement import Measurement

GRADIENT, STATE, INPUT, TEMPORARY, WORKSPACE = (
    ROLES.index(role) for role in ("gradient", "optimizer state", "input", "temporary", "cuBLAS workspace")
)
BUFFERS = {ROLES.index(role) for role in RANK_ROLES}


def survivors(log: Allocations) -> Iterator[int]:
    """Entries that the step makes and that are alive at its end."""
    return (entry for entry, born in enumerate(log.born) if born > 0 and log.died[entry] > log.n_ticks)


def replacements(log: Allocations) -> dict[int, int]:
    """Each entry from before the step that the step frees, with the entry of equal size that is left in its place."""
    left = defaultdict(list)
    for entry in survivors(log):
        if log.role[entry] != WORKSPACE:
            left[log.n_bytes[entry], log.role[entry] == GRADIENT].append(entry)
    replaced: dict[int, int] = {}
    for entry, (born, died) in enumerate(zip(log.born, log.died)):
        equal = left[log.n_bytes[entry], log.role[entry] == GRADIENT]
        if born == 0 and died <= log.n_ticks and equal:
            replaced[entry] = equal.pop(0)
    return replaced


def next_step(run: Measurement) -> Measurement:
    """The step after `run`, predicted; `run` itself if it left nothing new, or is no whole step of an optimizer."""
    log = run.allocations
    if log is None or run.origin != "recorded" or not run.complete:
        return run
    # A step of plain SGD allocates nothing and has no phase. The call of zero_grad then tells of the optimizer.
    optimizer = next((span.first_tick for span in run.phases if span.phase == "optimizer"), log.n_ticks + 1)
    if optimizer > log.n_ticks and run.zero_grad_tick is None:
        return run
    replaced = set(replacements(log).values())
    new = [entry for entry in survivors(log) if entry not in replaced and log.role[entry] not in BUFFERS]
    if not new:
        return run
    born, died, role = (array_of(values).copy() for values in (log.born, log.died, log.role))
    outputs = _outputs_of_model(log)
    older: dict[int, int] = {}  # the step's own entries, and the tick at which the value of the step before is freed
    for entry in new:
        if role[entry] == GRADIENT:
            older.update(_older_gradient(run, entry))
        elif role[entry] in (STATE, WORKSPACE) or born[entry] >= optimizer:
            born[entry] = 0
        else:
            older[entry] = outputs.get(entry, int(born[entry]))
    if run.keeps_gradients:  # backward makes each gradient, adds it to the one that is there, and frees it
        zeroed = [entry for entry in older if role[entry] == GRADIENT]
        died[zeroed] = np.minimum(born[zeroed] + 1, log.n_ticks + 1)
    return replace(run, allocations=_with_older(replace(log, born=_column(born), died=_column(died)), older))


def new_bytes(run: Measurement) -> dict[Role, int]:
    """Bytes by role that are in memory when the next step begins and were not when `run` began."""
    before, after = run.allocations, next_step(run).allocations
    totals: dict[Role, int] = defaultdict(int)
    for log, sign in ((after, 1), (before, -1)):
        if log is None:
            continue
        for n_bytes, role, born in zip(log.n_bytes, log.role, log.born):
            if not born:
                totals[ROLES[role]] += sign * n_bytes
    return {role: size for role, size in totals.items() if size > 0}


def _older_gradient(run: Measurement, entry: int) -> dict[int, int]:
    """The tick at which the next step drops the gradient `entry`; empty if it does so at its start."""
    log, tick = run.allocations, run.zero_grad_tick
    assert log is not None
    if run.keeps_gradients:
        return {entry: log.n_ticks + 1}
    return {} if tick is None else {entry: min(tick + 1, log.born[entry])}


def _outputs_of_model(log: Allocations) -> dict[int, int]:
    """Entries that calls of the model return, with the tick at which a variable has taken the first call's output."""
    calls = log.calls
    outer = [i for i, block in enumerate(calls.block) if log.blocks[block] == ""]
    if not outer:
        return {}
    until = calls.end_tick[outer[0]] + 1
    ends = np.cumsum(array_of(calls.n_inputs) + array_of(calls.n_outputs)).tolist()
    return {entry: until for i in outer for entry in calls.entries[ends[i] - calls.n_outputs[i] : ends[i]]}


def _with_older(log: Allocations, older: dict[int, int]) -> Allocations:
    """`log` with one more entry for each of `older`: its value of the step before, which is freed at the tick."""
    zeros = [0] * len(older)
    roles = [GRADIENT if log.role[entry] == GRADIENT else INPUT for entry in older]
    return replace(
        log,
        n_bytes=_repeated(log.n_bytes, older),
        born=_longer(log.born, zeros),
        died=_longer(log.died, older.values()),
        role=_longer(log.role, roles),
        block=_repeated(log.block, older),
        op=_longer(log.op, zeros),
        released=_longer(log.released, zeros),
        dtype=_repeated(log.dtype, older),
        stream=_repeated(log.stream, older),
        line=_longer(log.line, zeros),
    )


def _longer(values: Column, more: Iterable[int]) -> Column:
    """`values` and `more`; an empty column stays empty, because the record lacks it."""
    return column([*values, *more]) if len(values) else values


def _repeated(values: Column, entries: Iterable[int]) -> Column:
    """`values`, then those of `entries` a second time."""
    return _longer(values, (values[entry] for entry in entries))


def _column(values: Bytes) -> Column:
    return column(values.tolist())
