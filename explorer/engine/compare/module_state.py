"""Finds state that a recompute moves a second time, by reading the model's state before and after backward.

A forward that runs again moves state twice: a counter counts twice, a cache grows, a running mean drifts. Gradients
do not show the change. `StateAudit` reads the state at the borders of the phases and never changes the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from explorer.engine.state.state_diff import State, StateKey, read_state, same_state, short_text
from explorer.record.allocations import Phase
from explorer.record.comparison import StateChange


@dataclass
class StateAudit:
    """Collects the state of `model` that backward changes: pass `on_phase` to the step, then read `changes`."""

    model: nn.Module
    changes: dict[StateKey, StateChange] = field(default_factory=dict)
    _after_forward: State | None = None

    def on_phase(self, phase: Phase | str) -> None:
        """Called at the start of each phase: compares the state after a backward with the state at its start."""
        if phase == "backward" and self._after_forward is None:
            self._after_forward = read_state(self.model)
        elif phase != "backward":
            self.close()

    def close(self) -> None:
        """Ends the current backward, if any."""
        if self._after_forward is None:
            return
        before, after = self._after_forward, read_state(self.model)
        self._after_forward = None
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in self.changes and not same_state(before.get(key), after.get(key)):
                block, name, kind = key
                self.changes[key] = StateChange(
                    block=block, name=name, kind=kind,
                    after_forward=short_text(before.get(key)), after_backward=short_text(after.get(key)),
                )  # fmt: skip
