"""The tracker's columns after the step: the lifetime of each storage, and its role by lifetime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from explorer.engine.device.allocator import Ints
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import BACKWARD, FORWARD, OP_COLUMNS, RECOMPUTE, Tracker
from explorer.record.allocations import PHASES, ROLES
from explorer.record.base import Column

SAVED, RECOMPUTED, TEMPORARY = (ROLES.index(role) for role in ("saved activation", "recomputed", "temporary"))


class TrackedStep:
    """The tracker's columns as numpy arrays, without a copy."""

    def __init__(self, tracker: Tracker) -> None:
        seen = tracker.storages
        self.pointer, self.n_bytes = as_ints(seen.pointer), as_ints(seen.n_bytes)
        self.made_by, self.role = as_ints(seen.made_by), as_ints(seen.role)
        self.owner = as_ints(seen.owner)
        self.seen_ns, self.died_ns = as_ints(seen.seen_ns), as_ints(seen.died_ns)
        self.turns = as_ints(seen.turns)
        ops = as_ints(tracker.ops).reshape(-1, len(OP_COLUMNS))
        self.op_name, self.op_block, self.op_phase, self.op_first_ns, self.op_last_ns = ops.T
        self.scene_ns, self.scene_block = as_ints(tracker.scene_ns), as_ints(tracker.scene_block)
        self.scene_phase, self.scene_rerun = as_ints(tracker.scene_phase), as_ints(tracker.scene_rerun)
        self.borders = tracker.borders
        self.fqns = tracker.fqns
        self.n_before_step = seen.n_before_step
        self.n_ops = len(ops)

    def turn(self, *, of_death: bool) -> Ints:
        """Position of each storage's birth or death among all turns; the number of turns if there is none."""
        turn_of = np.full(len(self.n_bytes), len(self.turns), dtype=np.int64)
        where = np.flatnonzero(self.turns < 0 if of_death else self.turns > 0)
        turn_of[np.abs(self.turns[where]) - 1] = where
        return turn_of

    def roles(self) -> Ints:
        """Role of each storage: its tag, else by lifetime. A saved activation is born in a forward and outlives it."""
        made = self.made_by != NONE
        phase = np.full(len(self.n_bytes), BACKWARD, dtype=np.int64)
        phase[made] = self.op_phase[self.made_by[made]]
        by_phase = np.full(len(PHASES), TEMPORARY, dtype=np.int64)
        by_phase[RECOMPUTE] = RECOMPUTED
        roles = by_phase[phase]
        born, died = self.turn(of_death=False), self.turn(of_death=True)
        ends = [turn for _, turn in self.borders[1:]] + [len(self.turns)]
        for (border_phase, first), end in zip(self.borders, ends):
            if border_phase == FORWARD:
                roles[(phase == FORWARD) & (born >= first) & (born < end) & (died >= end)] = SAVED
        return np.where(self.role != NONE, self.role, roles)

    def peak_bytes(self, confirmed: NDArray[np.bool_]) -> int:
        """Most bytes held by confirmed storages at any turn."""
        which = np.abs(self.turns) - 1
        deltas = np.where(confirmed[which], np.sign(self.turns) * self.n_bytes[which], 0)
        return int(np.cumsum(deltas).max(initial=0))


def as_ints(values: Column | Sequence[int]) -> Ints:
    """A column as a numpy array of int64."""
    return np.asarray(values, dtype=np.int64)
