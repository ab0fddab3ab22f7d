"""The candidates of a planner, with prices: every module that runs, saves tensors and is safe to run again.

Parts of blocks are candidates: "these MLPs and those norms" is often cheaper than any choice of whole blocks. A price
is the measured time of one more forward, minus the part that early stop leaves out, plus the overhead of
torch.utils.checkpoint per call. Equal siblings take the mean of their times: the times differ by noise alone.

segments        Stretches of blocks in a chain. A segment keeps one input for several blocks. That matters if inputs
                are most of the saved bytes. The program of a chain (chain.py) gets stretches of every length, the
                integer program the shortest. All units of presets are offered too: no plan is worse than a preset.
kept operators  Each block that presets count offers to keep all its matrix products, attentions and convolutions, or
                one kind alone, if the operators were timed one by one. Such a unit is neither inside nor around another
                unit: torch's caches are not tested there.

offload         Each block that presets count, where offload is asked for. Its price is the time of all its copies at a
                stated bandwidth, as if none ran beside the step. In FLOPs it is more than any recompute of one block:
                a step without times offloads only where recompute does not reach the budget.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial

import numpy as np
from msgspec.structs import replace

from explorer.errors import InvalidPolicy
from explorer.plan.names import Fqns, above, is_within, lineage, nearest_around, overlaps, products_kept
from explorer.plan.policy.counted import counted_units, in_error, runs
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.calls import SavedByCall, calls_of, results_unknown, saved_by_calls
from explorer.plan.predict.not_predicted import run_again_by_the_model
from explorer.plan.predict.offloaded import as_calls, with_offload
from explorer.plan.predict.replay import Replay
from explorer.plan.predict.step_cost import (
    kin_of,
    overhead_ms,
    rerun_scale,
    stops_in,
    unit_flops,
    unit_ms,
    with_equal_times,
)
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import CostUnit
from explorer.record.policy import KEEP_ALL, Policy, Unit

Named = str | Fqns | Unit
"""A block, a segment, or a unit with its action."""
MOST_CANDIDATES = 800
"""A model with more candidates loses the modules inside repeated blocks, so that solving takes seconds."""
MOST_SEGMENTS = 24
"""Limit of stretches in the integer program: a length that would exceed the limit is not offered."""
MOST_STRETCHES = 1200
"""Limit of stretches in a chain (all of 49 blocks): above the limit only lengths in equal ratios are offered."""
MOST_NEAR = 400
"""Stretches near the segments of a plan, about."""
MOST_CHOICES = 2000
"""Choices of all places of a chain together; each is forecast once."""
MOST_PARTS = 2
MOST_WAYS = 3
"""Parts of a block, and ways to keep its results, that are offered beside every stretch of its chain."""
MOST_BLOCKS = 200
"""A model with more counted blocks has no such candidates, so that solving takes seconds."""


class Candidate(Record):
    """A unit that may be recomputed."""

    unit: Unit
    calls: tuple[SavedByCall, ...]
    cost: float
    """The cost of running the unit again, in `Candidates.cost_unit`."""
    kin: tuple[str, ...]
    """A key that equal units of equal blocks share."""


class Candidates(Record):
    """All units that a planner may choose from, and their nesting."""

    units: tuple[Candidate, ...]
    around: tuple[tuple[int, ...], ...]
    """Numbers of the candidates around each candidate, innermost first."""
    spared: Mapping[tuple[int, int], float]
    """By (candidate, candidate around it that stops where the first is entered): the cost that the outer one saves."""
    cost_unit: CostUnit
    step_cost: float
    """The cost of the whole step without recompute, in the same unit."""

    @cached_property
    def number(self) -> Mapping[Unit, int]:
        """The number of each unit."""
        return {candidate.unit: i for i, candidate in enumerate(self.units)}

    @cached_property
    def _inside(self) -> Mapping[int, list[int]]:
        inside: dict[int, list[int]] = defaultdict(list)
        for i, around in enumerate(self.around):
            for outer in around:
                inside[outer].append(i)
        return inside

    def _calls(self, units: Iterable[int]) -> list[tuple[int, SavedByCall]]:
        return [(i, call) for i in units for call in self.units[i].calls]

    def calls_inside(self, i: int, call: SavedByCall) -> list[tuple[int, SavedByCall]]:
        """Candidates inside a call of candidate `i`, each with its call."""
        calls = self._calls(self._inside.get(i, ()))
        return [(inner, other) for inner, other in calls if call.first <= other.first and other.end <= call.end]

    def calls_around(self, i: int, call: SavedByCall) -> list[tuple[int, SavedByCall]]:
        """Candidates around a call of candidate `i`, innermost first, each with its call."""
        calls = self._calls(self.around[i])
        return [(outer, other) for outer, other in calls if other.first <= call.first and call.end <= other.end]

    def exclude(self, i: int, j: int) -> bool:
        """True if no policy has both: they share a block, or are nested and one of them keeps results."""
        ours, theirs = self.units[i].unit, self.units[j].unit
        if excludes_nesting(ours) or excludes_nesting(theirs):
            return any(overlaps(block, *theirs.blocks) for block in ours.blocks)
        return not set(ours.blocks).isdisjoint(theirs.blocks)

    def policy(self, chosen: Sequence[int]) -> Policy:
        """The policy that recomputes the candidates `chosen`."""
        return Policy(units=tuple(self.units[i].unit for i in chosen))

    def cost(self, chosen: tuple[int, ...]) -> float:
        """The cost of recomputing the candidates `chosen`."""
        named = set(chosen)
        cost = 0.0
        for i in chosen:
            holder = next((outer for outer in self.around[i] if outer in named), -1)
            cost += self.units[i].cost - self.spared.get((i, holder), 0.0)
        return cost


def default_units(baseline: Measurement, graph: ModelGraph, replay: Replay, *, every_stretch: bool) -> list[Unit]:
    """All units that a planner offers by itself."""
    of_presets = [unit.blocks for whole in preset_units(graph) for unit in whole if len(unit.blocks) > 1]
    offered = dict.fromkeys((*offered_units(graph, every_stretch=every_stretch), *of_presets))
    units = [Unit(blocks=blocks) for blocks in offered]
    return [*units, *units_that_keep_results(baseline, graph, replay)] if _is_timed(baseline) else units


def candidates_of(
    baseline: Measurement, graph: ModelGraph, replay: Replay, units: Sequence[Unit], host_bandwidth: float = 0.0
) -> Candidates:
    """Those of `units` that may be chosen, on a keep-all step, recomputed with torch's defaults.

    `host_bandwidth`: bytes a second between device and host, for units that are offloaded.
    """
    costs = _Costs(baseline, graph)
    named = [unit for unit in units if not run_again_by_the_model(Policy(units=(unit,)), graph)]
    wrong = _in_error(graph, [unit.blocks for unit in named])
    kin = cache(partial(kin_of, graph))
    candidates: list[Candidate] = []
    for unit in named:
        if unit.action == "offload":
            calls, cost = tuple(as_calls(baseline, replay, unit)), costs.of_copies(replay, unit, host_bandwidth)
        else:
            calls, cost = () if unit.blocks in wrong else tuple(_calls(replay, graph, unit)), costs.of(unit)
        if any(len(call.entries) for call in calls):
            names = (*map(kin, unit.blocks), *unit.save_ops)
            candidates.append(Candidate(unit=unit, calls=calls, cost=cost, kin=names))
    chosen = [candidate.unit for candidate in candidates]
    around = _around(chosen)
    stops = [stops_in(graph, unit) for unit in chosen]
    spared: dict[tuple[int, int], float] = {}
    for i, inner in enumerate(chosen):
        for j in around[i]:
            if stops[j] and is_within(stops[j], *inner.blocks):
                spared[i, j] = costs.spared(chosen[j], inner)
    return Candidates(units=tuple(candidates), around=around, spared=spared, cost_unit=costs.unit, step_cost=costs.step)


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


def _around(units: Sequence[Unit]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the units around each unit, innermost first."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        if not excludes_nesting(unit):
            for fqn in unit.blocks:
                places[fqn].append(i)
    around: list[tuple[int, ...]] = [()] * len(units)
    for i, unit in enumerate(units):
        if not excludes_nesting(unit):
            around[i] = tuple(outer for fqn in above(unit.blocks[0]) for outer in places.get(fqn, ()))
    return tuple(around)


def unit_of(named: Named) -> Unit:
    """The unit that a block, a segment or a unit stands for."""
    if isinstance(named, Unit):
        return named
    return Unit(blocks=(named,) if isinstance(named, str) else named)


def _calls(replay: Replay, graph: ModelGraph, unit: Unit) -> list[SavedByCall]:
    if excludes_nesting(unit):
        return calls_of(replay, graph, unit, Policy(units=(unit,)))
    return saved_by_calls(replay, unit.blocks, stops_early=True)


def _is_timed(baseline: Measurement) -> bool:
    """True if the step and every block were timed."""
    step_ms = baseline.times.step.median_ms if baseline.times else None
    return step_ms is not None and all(cost.forward.ms for cost in baseline.blocks if cost.n_forward and cost.fqn)


class _Costs:
    """Costs of units as in the forecast: milliseconds if every block was timed, else FLOPs."""

    def __init__(self, baseline: Measurement, graph: ModelGraph) -> None:
        self._baseline, self._graph = with_equal_times(baseline, graph), graph
        self._scale = rerun_scale(baseline) or 1.0
        self.unit: CostUnit = "ms" if _is_timed(baseline) else "FLOPs"
        step_ms = baseline.times.step.median_ms if baseline.times and self.unit == "ms" else None
        self.step = float(baseline.total_flops or 0) if step_ms is None else step_ms

    def of(self, unit: Unit) -> float:
        """The cost of a rerun of `unit` with early stop, and of the overhead of its checkpoints."""
        overhead = overhead_ms(self._baseline, unit) if self.unit == "ms" else 0.0
        return self.again(unit, ()) + overhead

    def of_copies(self, replay: Replay, unit: Unit, bandwidth: float) -> float:
        """The cost of the copies of an offloaded `unit` if none runs beside the step."""
        if self.unit == "FLOPs":
            return self.step
        return 1e3 * with_offload(self._baseline, replay, (unit,)).moved_bytes / bandwidth

    def spared(self, unit: Unit, inside: Unit) -> float:
        """The cost that a rerun of `unit` saves because it ends where `inside` is entered."""
        return self.again(unit, ()) - self.again(unit, (inside,))

    def again(self, unit: Unit, inside: tuple[Unit, ...] = ()) -> float:
        """The cost of a rerun of `unit` that ends where a unit of `inside` is entered."""
        if self.unit == "ms":
            return self._scale * (unit_ms(self._baseline, self._graph, unit, inside, KEEP_ALL) or 0.0)
        return float(unit_flops(self._baseline, self._graph, unit, inside, KEEP_ALL) or 0)


def block_costs(baseline: Measurement, graph: ModelGraph, fqns: Iterable[str]) -> list[float]:
    """The cost of running each block again, without the overhead of a checkpoint, in `Candidates.cost_unit`."""
    costs = _Costs(baseline, graph)
    return [costs.again(Unit(blocks=(fqn,))) for fqn in fqns]


def offered_units(graph: ModelGraph, *, every_stretch: bool = False) -> list[Fqns]:
    """The offered units, single blocks first."""
    singles = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    if len(singles) > MOST_CANDIDATES:
        repeated = set(graph.repeats)
        singles = [fqn for fqn in singles if repeated.isdisjoint(list(lineage(fqn))[1:])]
    counted = (unit for unit in counted_units(graph) if len(unit) > 1)
    stretches = _of_all_lengths(chain_stretches(graph)) if every_stretch else _of_few_lengths(chain_stretches(graph))
    return [*((fqn,) for fqn in singles), *dict.fromkeys((*counted, *stretches))]


def beside_every_stretch(graph: ModelGraph, offered: Sequence[Unit]) -> list[Unit]:
    """Every stretch of the chains, and the units of `offered` that a program of a chain has room for beside them:
    whole blocks, the largest parts of each block, some ways to keep its results, and what lies outside of the chains.
    """
    chains = chain_stretches(graph)
    stretches = list(_of_all_lengths(chains))
    blocks = dict.fromkeys(fqn for chain in chains for fqn in chain)
    holders = set(lineage(*blocks))
    recomputed = {unit.blocks[0] for unit in offered if unit.action == "recompute"} - holders
    units: list[Unit] = []
    parts: dict[str, list[Unit]] = defaultdict(list)
    ways: dict[str, list[Unit]] = defaultdict(list)
    for unit in offered:
        fqn = unit.blocks[0]
        place = nearest_around(fqn, blocks)
        if len(unit.blocks) > 1 or not recomputed.isdisjoint(list(lineage(fqn))[1:]):
            continue
        if unit.action != "recompute":
            ways[place or ""].append(unit)
        elif fqn in holders or place is None:
            units.append(unit)
        else:
            parts[place].append(unit)
    if len(blocks) * (2 ** (1 + MOST_PARTS) + MOST_WAYS) + len(stretches) <= MOST_CHOICES:
        for fqn in blocks:
            parts[fqn].sort(key=lambda unit: -graph.by_fqn[unit.blocks[0]].saved_bytes)
            units += [*parts[fqn][:MOST_PARTS], *ways[fqn][:MOST_WAYS]]
    return [*units, *(Unit(blocks=stretch) for stretch in stretches)]


def preset_units(graph: ModelGraph) -> list[tuple[Unit, ...]]:
    """The units of every preset that keeps less than everything."""
    wholes = []
    for name in preset_titles():
        try:
            units = preset(name, graph).units
        except InvalidPolicy:  # there is no block to count
            return []
        if units:
            wholes.append(units)
    return list(dict.fromkeys(wholes))


def chain_stretches(graph: ModelGraph) -> list[Fqns]:
    """Blocks that hand on to each other, in order of execution: what presets count with what lies between, or the
    graph's own chain where that has the longer stretch."""
    counted = {fqn for unit in counted_units(graph) for fqn in unit}
    around = set(lineage(*counted))
    between = {fqn for fqn in graph.chain if fqn not in around and counted.isdisjoint(lineage(fqn))}
    levels = [_stretches(graph, level) for level in (counted | between, set(graph.chain))]
    return max(levels, key=lambda level: max(map(len, level), default=0))


def _stretches(graph: ModelGraph, fqns: Collection[str]) -> list[Fqns]:
    blocks = [(block.fqn,) for block in graph.blocks if block.fqn in fqns and block.n_calls]
    return [tuple(itertools.chain(*stretch)) for stretch in runs(blocks, graph)]


def _of_few_lengths(chains: Sequence[Fqns]) -> Iterator[Fqns]:
    n_offered = 0
    for length in range(2, max(map(len, chains), default=0) + 1):
        windows = list(_windows(chains, length))
        n_offered += len(windows)
        if n_offered > MOST_SEGMENTS:
            break
        yield from windows


def _of_all_lengths(chains: Sequence[Fqns]) -> Iterator[Fqns]:
    longest = max(map(len, chains), default=0)
    lengths: Iterable[int] = range(2, longest + 1)
    if n_stretches(chains) > MOST_STRETCHES:
        n_lengths = MOST_STRETCHES // sum(map(len, chains))
        lengths = np.unique(np.geomspace(2, longest, n_lengths).round().astype(int)).tolist()
    for length in lengths:
        yield from _windows(chains, length)


def n_stretches(chains: Iterable[Fqns]) -> int:
    """Number of all stretches of two blocks or more."""
    return sum(len(chain) * (len(chain) - 1) // 2 for chain in chains)


def units_near(graph: ModelGraph, policy: Policy) -> Iterator[Unit]:
    """Segments whose ends lie near those of the policy's units in a chain, or of one unit less, of equal lengths.

    The equal units are the chain's first blocks. Up to three neighbours may become one segment.
    """
    for chain in chain_stretches(graph):
        place = {fqn: i for i, fqn in enumerate(chain)}
        inside = [unit.blocks for unit in policy.units if unit.blocks[0] in place]
        units = sorted((place[blocks[0]], place[blocks[-1]] + 1) for blocks in inside)
        reach = int((MOST_NEAR / (3 * len(units) or 1)) ** 0.5 / 2)
        near = range(-reach, reach + 1)
        borders = np.linspace(0, sum(map(len, inside)), len(units)).astype(int).tolist()
        stretches = {
            chain[max(start + i, 0) : end + j]
            for some in (units, list(itertools.pairwise(borders)))
            for n, (start, _) in enumerate(some) for _, end in some[n : n + 3] for i in near for j in near
        }  # fmt: skip
        yield from (Unit(blocks=stretch) for stretch in stretches if len(stretch) > 1)


def _windows(chains: Sequence[Fqns], length: int) -> Iterator[Fqns]:
    for chain in chains:
        yield from (chain[first : first + length] for first in range(len(chain) - length + 1))


def units_that_keep_results(baseline: Measurement, graph: ModelGraph, replay: Replay) -> Iterator[Unit]:
    """Units that keep results, in the order of the blocks."""
    counted = counted_units(graph)
    for blocks in counted if len(counted) <= MOST_BLOCKS else ():
        every = products_kept(blocks, graph)
        if (
            every.save_ops
            and unit_ms(baseline, graph, every, (), KEEP_ALL) is not None
            and not results_unknown(replay, every.save_ops)
        ):
            yield every
            if len(every.save_ops) > 1:
                yield from (replace(every, save_ops=(op,)) for op in every.save_ops)


def excludes_nesting(unit: Unit) -> bool:
    """True if the unit may be neither inside nor around another unit."""
    return unit.action != "recompute"
