"""Memory of one rank, action by action, from what its stages cost.

held between actions:    parameters + receive buffers + saved activations in flight + gradients + sends in flight
held while one runs:     that sum, and the action's highest point above it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from explorer.plan.pipeline.rules import Triple
from explorer.plan.pipeline.split_backward import Priced
from explorer.record.pipeline_cost import ActionCost, StageCost
from explorer.record.pipeline_run import ActionTime, RankMemory, rank_memory
from explorer.record.run import PipelinePlan


@dataclass
class RankForecast:
    """Walks through the actions of every rank; `home` says where every stage lives, `cost_of(stage, microbatch)`
    what an action of theirs costs."""

    plan: PipelinePlan
    costs: tuple[StageCost, ...]
    home: dict[int, int]
    cost_of: Callable[[int, int], Priced]
    _with_gradient: set[int] = field(default_factory=set)

    def ranks(self, n_ranks: int, times: Sequence[ActionTime]) -> tuple[RankMemory, ...]:
        """Held bytes at the highest point and at the end of every action; `times` in order of their start."""
        path_of_rank: defaultdict[int, list[ActionTime]] = defaultdict(list)
        for time in times:
            path_of_rank[time.rank].append(time)
        return tuple(self._memory(rank, path_of_rank[rank]) for rank in range(n_ranks))

    def _memory(self, rank: int, times: list[ActionTime]) -> RankMemory:
        parameters, buffers = self._fixed(rank)
        held = parameters + buffers
        samples = [(0, held, "")]
        for time in times:
            high, held = self._through((time.stage, time.kind, time.microbatch), held)
            samples += [(round(time.start_ms * 1e6), high, time.name), (round(time.end_ms * 1e6), held, "")]
        return rank_memory(rank, "predicted", samples, parameter_bytes=parameters, receive_bytes=buffers)

    def peak_bytes(self, rank: int, row: Sequence[Triple]) -> int:
        """Most that a rank holds while it does `row`; of other ranks' stages nothing is asked."""
        peak = held = sum(self._fixed(rank))
        for action in row:
            high, held = self._through(action, held)
            peak = max(peak, high, held)
        return peak

    def _fixed(self, rank: int) -> tuple[int, int]:
        """Parameters and receive buffers, held all the time."""
        own = [self.costs[stage] for stage, home in self.home.items() if home == rank]
        buffers = sum(stage.receive_bytes + stage.gradient_receive_bytes for stage in own) * self.plan.n_microbatches
        return sum(stage.parameter_bytes for stage in own), buffers

    def _through(self, action: Triple, held: int) -> tuple[int, int]:
        """Highest point of an action that begins with `held`, and what is held after it."""
        stage, kind, i = action
        cost, split = self.cost_of(stage, i)
        if kind == "F":
            # An output for a stage of the same rank takes the place of that stage's buffer.
            taken = self.costs[stage].gradient_receive_bytes if self._same_rank(stage, stage + 1) else 0
            return held + cost.forward_extra_bytes, held + cost.saved_bytes - taken
        if kind == "I":
            # Of what it passes on, a whole backward sends a copy, and I the very gradient that came.
            after = held + split.owed_bytes + self._sent_gradient(stage, i, cost, self.costs[stage].passed_bytes)
            return held + split.input_extra_bytes, after
        first = stage not in self._with_gradient
        self._with_gradient.add(stage)
        after = held - cost.saved_bytes + self._sent_output(stage, i) + self.costs[stage].loss_bytes
        after += self.costs[stage].gradient_bytes if first else 0
        if kind == "W":
            extra = split.first_weight_extra_bytes if first else split.weight_extra_bytes
            return held + extra, after - split.owed_bytes
        extra = cost.first_backward_extra_bytes if first else cost.backward_extra_bytes
        return held + extra, after + self._sent_gradient(stage, i, cost, 0)

    def _sent_output(self, stage: int, i: int) -> int:
        """Bytes of an output that torch still holds when its microbatch is through (held_sends.py has the rules)."""
        if stage + 1 not in self.home:
            return 0
        size, m = self.costs[stage].gradient_receive_bytes - self.costs[stage].passed_bytes, self.plan.n_microbatches
        if not self._is_1f1b or self._same_rank(stage, stage + 1):
            return size
        n_warm_up = min(m, len(self.costs) - stage)
        taken = size if i == n_warm_up - 2 and i < m - n_warm_up else 0
        given = size if 0 <= n_warm_up - 2 < m - n_warm_up == i else 0
        return taken - given

    def _sent_gradient(self, stage: int, i: int, cost: ActionCost, passed: int) -> int:
        """Bytes of a gradient that torch holds after sending it; within the rank it takes the place of a buffer."""
        if stage == 0 or (self._is_1f1b and i > 0):
            return 0
        received = self.costs[stage].receive_bytes
        sent = received if cost.sent_gradient_bytes is None else cost.sent_gradient_bytes
        return sent - passed - (received if self._same_rank(stage, stage - 1) else 0)

    def _same_rank(self, stage: int, to: int) -> bool:
        """True if both stages live on the same rank."""
        return self.home.get(to) == self.home[stage]

    @property
    def _is_1f1b(self) -> bool:
        return self.plan.schedule == "1F1B" and not self.plan.actions
