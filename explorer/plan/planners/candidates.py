"""What a planner may choose from: every module that runs, saves something and is safe to run again, and its price.

Not whole blocks alone: "these MLPs and those norms" is often cheaper than any choice of blocks. A price is the
measured time of one more forward, less the part that early stop leaves out, plus what torch.utils.checkpoint itself
takes a call. Equal siblings take the mean of their times: they differ by noise alone.

Segments are among them where a step has few blocks to join, see offered.py; kept operators and offload are not: their
price is that of a dispatch mode in Python, or of a way to the host, and nobody has measured either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.rerun_flops import rerun_flops, stops_inside
from explorer.plan.forecast.rerun_ms import rerun_share
from explorer.plan.forecast.rerun_time import checkpoint_ms, scale
from explorer.plan.forecast.saved_by_call import SavedByCall, saved_by_calls
from explorer.plan.names import Fqns, lineage
from explorer.plan.planners.offered import offered
from explorer.plan.policy.counted import in_error
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import CostUnit
from explorer.record.policy import KEEP_ALL, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One unit that may be recomputed."""

    unit: Unit
    calls: tuple[SavedByCall, ...]
    cost: float
    """The cost of running it again, in `Candidates.cost_unit`."""
    kin: tuple[str, ...]
    """The same for equal units of equal blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Everything a planner may choose from, and how it lies in each other."""

    units: tuple[Candidate, ...]
    around: tuple[tuple[int, ...], ...]
    """For each candidate those that it lies in, innermost first."""
    stops_in: tuple[tuple[int, ...], ...]
    """For each candidate those inside at whose entry its recompute ends early."""
    cost_unit: CostUnit
    step_cost: float
    """The cost of the whole step without recompute, in the same unit."""


def candidates_of(
    baseline: Measurement, graph: ModelGraph, replay: Replay, *, among: Iterable[str | Fqns] | None = None
) -> Candidates:
    """Candidates on a keep-all step, recomputed with torch's own defaults; of `among` alone where it is given."""
    named = offered(graph) if among is None else [(one,) if isinstance(one, str) else one for one in among]
    wrong = set(in_error(graph, named))
    left = [(unit, tuple(saved_by_calls(replay, unit, stops_early=True))) for unit in named if unit not in wrong]
    saving = [(unit, calls) for unit, calls in left if any(len(call.entries) for call in calls)]
    costs = _Costs(baseline, graph)
    units = tuple(
        Candidate(unit=Unit(blocks=unit), calls=calls, cost=costs.of(unit, len(calls)), kin=costs.kin(unit))
        for unit, calls in saving
    )
    places: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(units):
        for fqn in one.unit.blocks:
            places[fqn].append(i)
    around = tuple(
        tuple(i for fqn in list(lineage(one.unit.blocks[0]))[1:] for i in places.get(fqn, ())) for one in units
    )
    stops: list[list[int]] = [[] for _ in units]
    for i, above in enumerate(around):
        for j in above:
            if stops_inside(graph, units[j].unit, units[i].unit):
                stops[j].append(i)
    return Candidates(
        units=units,
        around=around,
        stops_in=tuple(map(tuple, stops)),
        cost_unit=costs.unit,
        step_cost=costs.step,
    )


class _Costs:
    """Milliseconds where every block was timed, else FLOPs."""

    def __init__(self, baseline: Measurement, graph: ModelGraph) -> None:
        self._baseline, self._graph = baseline, graph
        step = baseline.times.step.median_ms if baseline.times else None
        timed = step is not None and all(cost.forward.ms for cost in baseline.blocks if cost.n_forward and cost.fqn)
        self._scale = scale(baseline) or 1.0
        self.unit: CostUnit = "ms" if timed else "FLOPs"
        self.step = float(step if timed and step is not None else baseline.total_flops or 0)
        self._whole: dict[str, float] = {}
        """By kin of a block, the milliseconds of its forward."""
        self._again: dict[str, float] = {}
        """The part of them that runs again where recompute ends with it."""
        whole: dict[str, list[float]] = defaultdict(list)
        again: dict[str, list[float]] = defaultdict(list)
        for cost in baseline.blocks if timed else ():
            if cost.fqn in graph.by_fqn and cost.forward.median_ms is not None:
                whole[self._first(cost.fqn)].append(cost.forward.median_ms)
                share = rerun_share(cost, graph.by_fqn[cost.fqn]) or 0.0
                again[self._first(cost.fqn)].append(share * cost.forward.median_ms)
        self._whole = {kin: mean(ms) for kin, ms in whole.items()}
        self._again = {kin: mean(ms) for kin, ms in again.items()}

    def kin(self, unit: Fqns) -> tuple[str, ...]:
        """Each fqn with the numbers of repeated blocks replaced by those of the first of their run, and its FLOPs."""
        return tuple(self._first(fqn) for fqn in unit)

    def of(self, unit: Fqns, n_calls: int) -> float:
        """One more forward of `unit`, early stop's share taken off."""
        if self.unit == "FLOPs":
            return float(rerun_flops(self._baseline, self._graph, unit, KEEP_ALL))
        *before, last = map(self._first, unit)
        ms = sum(self._whole.get(kin, 0.0) for kin in before) + self._again.get(last, 0.0)
        return ms * self._scale + checkpoint_ms(self._baseline) * n_calls

    def _first(self, fqn: str) -> str:
        parts = fqn.split(".")
        for n in range(1, len(parts) + 1):
            block = self._graph.by_fqn.get(".".join(parts[:n]))
            if block is not None and block.repeat_of is not None:
                parts[:n] = block.repeat_of.split(".")
        block = self._graph.by_fqn.get(fqn)
        return f"{'.'.join(parts)} {block.forward_flops if block else 0}"
