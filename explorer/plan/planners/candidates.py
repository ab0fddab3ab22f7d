"""The candidates of a planner, with prices: every module that runs, saves tensors and is safe to run again.

Candidates include parts of blocks: "these MLPs and those norms" is often cheaper than any choice of whole blocks. A
price is the measured time of one more forward, minus the part that early stop leaves out, plus the overhead of
torch.utils.checkpoint per call. Equal siblings take the mean of their times: the times differ by noise alone.

Segments are candidates if a step has few blocks to join (offered.py). Blocks that keep the results of some operators
are candidates if the operators were timed (keeping.py). Offload is none: transfers to the host are not measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from explorer.plan.names import Fqns, lineage
from explorer.plan.planners.keeping import is_kept_apart, keeping_units
from explorer.plan.planners.offered import Named, OfferedChoices, offered, offered_whole
from explorer.plan.policy.counted import in_error
from explorer.plan.predict.calls import SavedByCall, calls_of, saved_by_calls
from explorer.plan.predict.replay import Replay
from explorer.plan.predict.step_cost import (
    kin_of,
    overhead_ms,
    rerun_scale,
    stops_inside,
    unit_flops,
    unit_ms,
    with_equal_times,
)
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import CostUnit
from explorer.record.policy import KEEP_ALL, Policy, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A unit that may be recomputed."""

    unit: Unit
    calls: tuple[SavedByCall, ...]
    cost: float
    """The cost of running the unit again, in `Candidates.cost_unit`."""
    kin: tuple[str, ...]
    """A key that equal units of equal blocks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All units that a planner may choose from, and their nesting."""

    units: tuple[Candidate, ...]
    around: tuple[tuple[int, ...], ...]
    """Numbers of the candidates around each candidate, innermost first."""
    spared: Mapping[tuple[int, int], float]
    """By (candidate, candidate around it that stops where the first is entered): the cost that the outer one saves."""
    cost_unit: CostUnit
    step_cost: float
    """The cost of the whole step without recompute, in the same unit."""

    def cost(self, chosen: tuple[int, ...]) -> float:
        """The cost of recomputing the candidates `chosen`."""
        named = set(chosen)
        holders = ((i, next((o for o in self.around[i] if o in named), None)) for i in chosen)
        return float(sum(self.units[i].cost - (0.0 if o is None else self.spared.get((i, o), 0.0)) for i, o in holders))


def candidates_of(baseline: Measurement, graph: ModelGraph, replay: Replay, offer: OfferedChoices) -> Candidates:
    """Candidates on a keep-all step, recomputed with torch's defaults."""
    costs = _Costs(baseline, graph)
    if offer.among is None:
        named = [Unit(blocks=blocks) for blocks in _named(graph, every_stretch=offer.every_stretch)]
        named += keeping_units(baseline, graph, replay) if costs.unit == "ms" else ()
    else:
        named = [_unit(one) for one in offer.among]
    struck = {_unit(one) for one in offer.without}
    named = [unit for unit in named if unit not in struck]
    wrong = _in_error(graph, [unit.blocks for unit in named])
    left = [(unit, tuple(_calls(replay, graph, unit))) for unit in named if unit.blocks not in wrong]
    saving = [(unit, calls) for unit, calls in left if any(len(call.entries) for call in calls)]
    units = tuple(
        Candidate(
            unit=unit,
            calls=calls,
            cost=costs.of(unit),
            kin=(*(kin_of(graph, fqn) for fqn in unit.blocks), *unit.save_ops),
        )
        for unit, calls in saving
    )
    around = _around(units)
    spared = {
        (i, j): costs.spared(units[j].unit, units[i].unit)
        for i, above in enumerate(around) for j in above
        if stops_inside(graph, units[j].unit, units[i].unit)
    }  # fmt: skip
    return Candidates(
        units=units,
        around=around,
        spared=spared,
        cost_unit=costs.unit,
        step_cost=costs.step,
    )


def _in_error(graph: ModelGraph, units: Sequence[Fqns]) -> set[Fqns]:
    """Units that a hazard forbids. Segments are tested in groups of one first or one last block."""
    wrong = set(in_error(graph, [unit for unit in units if len(unit) == 1]))
    segments = [unit for unit in units if len(unit) > 1]
    by_end = []
    for end in (0, -1):
        groups: dict[str, list[Fqns]] = defaultdict(list)
        for unit in segments:
            groups[unit[end]].append(unit)
        by_end.append({unit for group in groups.values() for unit in in_error(graph, group)})
    return wrong | (by_end[0] & by_end[1])


def _around(units: Sequence[Candidate]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the candidates around each candidate, innermost first."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(units):
        for fqn in () if is_kept_apart(one.unit) else one.unit.blocks:
            places[fqn].append(i)
    return tuple(
        ()
        if is_kept_apart(one.unit)
        else tuple(i for fqn in list(lineage(one.unit.blocks[0]))[1:] for i in places.get(fqn, ()))
        for one in units
    )


def _named(graph: ModelGraph, *, every_stretch: bool) -> list[Fqns]:
    of_presets = [unit.blocks for whole in offered_whole(graph) for unit in whole if len(unit.blocks) > 1]
    return list(dict.fromkeys((*offered(graph, every_stretch=every_stretch), *of_presets)))


def _unit(named: Named) -> Unit:
    return named if isinstance(named, Unit) else Unit(blocks=(named,) if isinstance(named, str) else named)


def _calls(replay: Replay, graph: ModelGraph, unit: Unit) -> list[SavedByCall]:
    if is_kept_apart(unit):
        return calls_of(replay, graph, unit, Policy(units=(unit,)))
    return saved_by_calls(replay, unit.blocks, stops_early=True)


class _Costs:
    """Costs of units as in the forecast: milliseconds if every block was timed, else FLOPs."""

    def __init__(self, baseline: Measurement, graph: ModelGraph) -> None:
        self._baseline, self._graph = with_equal_times(baseline, graph), graph
        step = baseline.times.step.median_ms if baseline.times else None
        timed = step is not None and all(cost.forward.ms for cost in baseline.blocks if cost.n_forward and cost.fqn)
        self._scale = rerun_scale(baseline) or 1.0
        self.unit: CostUnit = "ms" if timed else "FLOPs"
        self.step = float(step if timed and step is not None else baseline.total_flops or 0)

    def of(self, unit: Unit) -> float:
        """The cost of a rerun of `unit` with early stop, and of the overhead of its checkpoints."""
        overhead = overhead_ms(self._baseline, unit) if self.unit == "ms" else 0.0
        return self._again(unit, ()) + overhead

    def spared(self, unit: Unit, inside: Unit) -> float:
        """The cost that a rerun of `unit` saves because it ends where `inside` is entered."""
        return self._again(unit, ()) - self._again(unit, (inside,))

    def _again(self, unit: Unit, inside: tuple[Unit, ...]) -> float:
        if self.unit == "ms":
            return self._scale * (unit_ms(self._baseline, self._graph, unit, inside, KEEP_ALL) or 0.0)
        return float(unit_flops(self._baseline, self._graph, unit, inside, KEEP_ALL) or 0)
