"""Memory of one rank, action by action, from what its stages cost.

parameters + receive buffers + saved activations in flight + gradients + sent tensors torch still holds
and, while an action runs, its highest point above that
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from explorer.plan.schedule_text import Action
from explorer.record.pipeline import ActionCost, ActionTime, RankMemory, StageCost, rank_memory
from explorer.record.plan import PipelinePlan


@dataclass
class RankForecast:
    """Walks through one rank's actions; `ranks` says where every stage lives."""

    plan: PipelinePlan
    costs: tuple[StageCost, ...]
    ranks: dict[int, int]
    rank: int
    _with_gradient: set[int] = field(default_factory=set)

    def memory(self, times: tuple[ActionTime, ...], cost_of: Callable[[Action], ActionCost]) -> RankMemory:
        """Held bytes at the highest point and at the end of every action."""
        own = [self.costs[stage] for stage, rank in self.ranks.items() if rank == self.rank]
        parameters = sum(stage.parameter_bytes for stage in own)
        buffers = sum(stage.receive_bytes + stage.gradient_receive_bytes for stage in own) * self.plan.n_microbatches
        held = parameters + buffers
        samples = [(0, held, "")]
        for time in times:
            if time.rank == self.rank:
                action = Action(time.stage, time.kind, time.microbatch)
                high, held = self._through(action, cost_of(action), held)
                samples += [(round(time.start_ms * 1e6), high, time.name), (round(time.end_ms * 1e6), held, "")]
        return rank_memory(self.rank, "predicted", samples, parameter_bytes=parameters, receive_bytes=buffers)

    def _through(self, action: Action, cost: ActionCost, held: int) -> tuple[int, int]:
        """Highest point of `action`, and what is held after it."""
        if action.kind == "F":
            return held + cost.forward_extra_bytes, held + cost.saved_bytes
        if action.kind == "I":
            return held + cost.backward_extra_bytes, held + self._sent_gradient(action)
        first = action.stage not in self._with_gradient
        self._with_gradient.add(action.stage)
        made = self.costs[action.stage].gradient_bytes if first else 0
        extra = cost.first_backward_extra_bytes if first else cost.backward_extra_bytes
        after = held + made - cost.saved_bytes + self._sent_output(action)
        return held + extra, after + (self._sent_gradient(action) if action.kind == "B" else 0)

    def _sent_output(self, action: Action) -> int:
        """Bytes of an output that torch still holds when its microbatch is through (held_sends.py has the rules)."""
        stage, i, m = action.stage, action.microbatch, self.plan.n_microbatches
        if not self._goes_away(stage, stage + 1):
            return 0
        size = self.costs[stage].gradient_receive_bytes
        if not self._is_1f1b:
            return size
        n_warm_up = min(m, len(self.costs) - stage)
        taken = size if i == n_warm_up - 2 and i < m - n_warm_up else 0
        given = size if 0 <= n_warm_up - 2 < m - n_warm_up == i else 0
        return taken - given

    def _sent_gradient(self, action: Action) -> int:
        """Bytes of a gradient that torch holds after sending it."""
        if not self._goes_away(action.stage, action.stage - 1):
            return 0
        size = self.costs[action.stage].receive_bytes
        return size if not self._is_1f1b or action.microbatch == 0 else 0

    def _goes_away(self, stage: int, to: int) -> bool:
        return to in self.ranks and self.ranks[to] != self.ranks[stage]

    @property
    def _is_1f1b(self) -> bool:
        return self.plan.schedule == "1F1B" and not self.plan.actions
