"""What a rival is, and what it is told: one measured step, its graph, and a forecast of any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from explorer.errors import BadInput
from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.names import Fqns
from explorer.plan.planners.budget import Planner
from explorer.plan.policy.counted import counted_units, runs
from explorer.plan.sizes import mib
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit


class Situation:
    """The step that everybody plans for. `run` is any complete run of it."""

    def __init__(self, run: Measurement, graph: ModelGraph) -> None:
        """Raises BadInput for a run that tells too little to plan from."""
        self.run, self.graph = run, graph
        self.forecaster = Forecaster(run, graph)
        self.keep_all_bytes = self.planner.keep_all_bytes

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.run, self.graph)

    @cached_property
    def units(self) -> tuple[Fqns, ...]:
        """What presets count. Raises BadInput where nothing is worth recomputing by itself."""
        counted = counted_units(self.graph)
        if not counted:
            raise BadInput(f"No block of {self.graph.model.target} is one to recompute by itself.")
        return counted

    def peak_of(self, policy: Policy) -> int | None:
        return self.forecaster.peak_bytes(policy)

    def forward_ms(self, unit: Fqns) -> float:
        """Measured; where nothing was timed, FLOPs, in a unit that no milliseconds are mixed with."""
        costs = [self.forecaster.baseline.by_fqn[fqn] for fqn in unit] if self.forecaster.baseline is not None else []
        timed = [cost.forward.median_ms for cost in costs]
        return sum(ms for ms in timed if ms is not None) or float(sum(cost.forward_flops for cost in costs))

    def saved_bytes(self, unit: Fqns) -> int:
        return sum(self.graph.by_fqn[fqn].saved_bytes for fqn in unit)

    def segments(self, units: Iterable[Fqns]) -> Policy:
        """Each of `units` as segments: parted where one block does not hand on to the next."""
        return Policy(units=tuple(Unit(blocks=part) for unit in units for part in self._parts(unit)))

    def cheapest_that_fits(self, policies: Iterable[Policy], budget_bytes: int) -> Policy:
        """By the forecast. Raises BadInput where none fits, with the lowest peak of all."""
        peaks = [(policy, self.peak_of(policy)) for policy in policies]
        known = [(policy, peak) for policy, peak in peaks if peak is not None]
        fitting = [policy for policy, peak in known if peak <= budget_bytes]
        if not fitting:
            least = min((peak for _, peak in known), default=None)
            raise BadInput(
                f"The least that it reaches is {mib(least)}." if least is not None else "Nothing is foreseen."
            )
        return min(fitting, key=self._cost)

    def _cost(self, policy: Policy) -> float:
        foreseen = self.forecaster.forecast(policy)
        return foreseen.time_ratio or foreseen.flop_ratio or 1.0

    def _parts(self, unit: Fqns) -> Iterable[Fqns]:
        for stretch in runs([(fqn,) for fqn in unit], self.graph):
            yield tuple(fqn for (fqn,) in stretch)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A planner that can be asked for a policy."""

    title: str
    source: str
    """Who says so: a paper, a function of torch, a package."""
    place: int
    choose: Callable[[Situation, int], Policy] | None = None
    """Raises BadInput where it cannot plan here, or finds nothing that fits. None: it changes the model in a way that
    no policy says, by the function of its name in engine/arena."""
    takes_budget: bool = True
    module: str = ""
    """The file of engine/arena, where `choose` is None."""
