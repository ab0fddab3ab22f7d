"""Sent tensors that torch's schedules still hold. Without these tensors, memory by rank would be too low.

Read in torch 2.13 (schedules.py) and confirmed against real ranks over gloo, to the byte (tests/engine/pipeline):
GPipe and the runtime keep the handles of all sends to the end of the step. 1F1B keeps its last sent gradient until the
next send. 1F1B also keeps the output of its last warm-up send but one until the drain begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from explorer.plan.pipeline.actions import Action


@dataclass
class HeldSends:
    """Tensors kept alive by the handles of one pass. `n_stages` and `n_microbatches` come from the plan."""

    one_f_one_b: bool
    n_stages: int
    n_microbatches: int
    _all: list[Any] = field(default_factory=list)
    _gradient: dict[int, Any] = field(default_factory=dict)
    _warm_up: dict[int, Any] = field(default_factory=dict)

    def after(self, action: Action, sent: Any) -> None:
        """`action` is done and `sent` has gone to another rank."""
        if not self.one_f_one_b:
            self._all.append(sent)
            return
        n_warm_up = min(self.n_microbatches, self.n_stages - action.stage)
        if action.kind == "F" and action.microbatch == n_warm_up - 2:
            self._warm_up[action.stage] = sent
        elif action.kind == "B":
            self._gradient[action.stage] = sent
            if action.microbatch >= self.n_microbatches - n_warm_up:
                self._warm_up.pop(action.stage, None)
