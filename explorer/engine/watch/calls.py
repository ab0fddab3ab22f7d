"""Inputs and outputs of each forward call of a block: a checkpoint keeps its inputs until backward."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np

from explorer.engine.device.allocator import Ints
from explorer.record.allocations import Calls
from explorer.record.base import column

UNENDED = 2**62
"""Later than any time in ns."""


class CallLog:
    """One entry for each call, in order of begin. Storages are the tracker's numbers."""

    def __init__(self) -> None:
        self.block, self.first_ns, self.last_ns = array("q"), array("q"), array("q")
        self.inputs: list[Sequence[int]] = []
        self.outputs: list[Sequence[int]] = []

    def begin(self, block: int, storages: Sequence[int]) -> int:
        """Adds a call that begins now and returns its number."""
        self.block.append(block)
        self.first_ns.append(time.time_ns())
        self.last_ns.append(UNENDED)
        self.inputs.append(storages)
        self.outputs.append(())
        return len(self.block) - 1

    def end(self, call: int, storages: Sequence[int]) -> None:
        """Ends call number `call` now. A call without an end, after an error, lasts to the end of the step."""
        self.last_ns[call] = time.time_ns()
        self.outputs[call] = storages

    def record(self, tick_ns: Ints, entry_of: Ints) -> Calls:
        """The calls on a timeline: tick i + 1 is at `tick_ns[i]`, and storage s has the entry `entry_of[s]`, or -1."""

        def known(storages: Sequence[int]) -> list[int]:
            return [entry for entry in (int(entry_of[storage]) for storage in storages) if entry >= 0]

        inputs, outputs = ([known(storages) for storages in side] for side in (self.inputs, self.outputs))
        return Calls(
            block=column(self.block),
            first_tick=column(np.searchsorted(tick_ns, np.asarray(self.first_ns), side="right").tolist()),
            end_tick=column(np.searchsorted(tick_ns, np.asarray(self.last_ns), side="right").tolist()),
            n_inputs=column(len(entries) for entries in inputs),
            n_outputs=column(len(entries) for entries in outputs),
            entries=column(entry for pair in zip(inputs, outputs) for entries in pair for entry in entries),
        )
