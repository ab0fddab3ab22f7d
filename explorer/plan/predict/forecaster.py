"""The predicted peak, cost and saved bytes of a policy, from one measured run and before the policy runs.

`Forecaster` is what other rooms call. It simulates the policy on the measured timeline (changes.py) and prices the
reruns (step_cost.py). It also lists what the predicted peak is made of. `prices` has the effect of toggling each block:
MiB of peak for a percent of recompute. A block that is not alive at the peak costs FLOPs and moves no peak."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace

from explorer.plan.memory.ledger import Bytes, cells_of, ints, ledger
from explorer.plan.memory.next_step import next_step
from explorer.plan.names import Fqns, above, is_within, nearest_around
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.calls import SavedByCall, calls_of, only_of, results_unknown, stash_bytes
from explorer.plan.predict.changes import Simulation, joined, nest_of, simulate, units_around
from explorer.plan.predict.not_predicted import not_covered, not_predicted, run_again_by_the_model
from explorer.plan.predict.offloaded import Offloaded, with_offload
from explorer.plan.predict.predicted_step import predicted_step
from explorer.plan.predict.replay import Replay, graph_under
from explorer.plan.predict.step_cost import costs_of, rerun_flops, time_ratio, unit_flops, with_equal_times
from explorer.record.allocations import Ledger, LedgerCell, Role
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Price
from explorer.record.policy import Policy, Unit


class Forecaster:
    """Forecasts of policies on one baseline, sorted for simulation once and read at every toggle.

    `run` is any complete run of the step. From a run with recompute the keep-all baseline is put together first.
    """

    def __init__(self, run: Measurement, graph: ModelGraph | None = None) -> None:
        graph = graph_under(run, graph)
        self._of_step(keep_all_from(run, graph), graph)

    def _of_step(self, baseline: Measurement | None, graph: ModelGraph | None) -> None:
        self.baseline = baseline
        """The keep-all step; None if it cannot be derived from the run, and nothing is forecast."""
        self._graph = graph
        self._timed = with_equal_times(self.baseline, graph) if self.baseline and graph else self.baseline
        self.replay = None if self.baseline is None else Replay.of(self.baseline, graph)
        self._saved: dict[tuple[Unit, Policy, tuple[str, ...]], list[SavedByCall]] = {}
        self._offloaded: dict[tuple[Unit, ...], tuple[Forecaster, Offloaded]] = {}

    def _with_offload(self, units: tuple[Unit, ...]) -> tuple[Forecaster, Offloaded]:
        """A forecaster of the step with `units` offloaded."""
        if units not in self._offloaded:
            assert self.baseline is not None and self.replay is not None, "it was replayed"
            moved, other = with_offload(self.baseline, self.replay, units), copy.copy(self)
            other._of_step(moved.run, self._graph)
            assert other.replay is not None, "it was replayed before"
            other.replay = dataclasses.replace(other.replay, saved_outside=moved.saved_outside)
            self._offloaded[units] = other, moved
        return self._offloaded[units]

    def forecast(self, policy: Policy) -> Forecast:
        """The figures of `policy`; a figure that is not predicted is None, and not_predicted.py has the reason."""
        baseline = self.baseline
        if baseline is None or not_covered(policy, baseline) or run_again_by_the_model(policy, self._graph):
            return Forecast()
        offloaded, rest = _parted(policy)
        if offloaded and self.replay is not None:
            forecaster, moved = self._with_offload(offloaded)
            forecast = forecaster.forecast(rest)
            return replace(forecast, host_peak_bytes=moved.host_peak_bytes, moved_bytes=moved.moved_bytes)
        units = inside(policy)
        again = [unit_flops(baseline, self._graph, unit, within, policy) for unit, within in units.items()]
        counted, total = [flops for flops in again if flops is not None], baseline.total_flops
        flop_ratio = 1 + sum(counted) / total if total and len(counted) == len(again) else None
        unknown = not_predicted(policy, self._graph, baseline)
        replay = self._replay_of(policy)
        if replay is None or (unknown and any(unit.action != "recompute" for unit in policy.units)):
            return Forecast(flop_ratio=flop_ratio)
        calls, saved = self._calls(replay, policy), baseline.saved_after_forward_bytes
        simulation = self._simulate(replay, policy, calls)
        forecast = Forecast(
            step_peak_bytes=None if unknown else simulation.peak_bytes,
            saved_after_forward_bytes=None if saved is None else saved + simulation.saved_bytes,
            flop_ratio=flop_ratio,
            freed_bytes=_freed_bytes(simulation, policy, calls, baseline.forward_end_tick or 0),
        )
        timed = time_ratio(self._timed or baseline, self._graph, units, policy)
        if timed is None:
            return forecast
        ratio, spread, of_calls = timed
        return replace(forecast, time_ratio=ratio, time_ratio_spread=spread, time_ratio_of_calls=of_calls)

    def peak_bytes(self, policy: Policy) -> int | None:
        """The peak of `forecast` alone."""
        _, simulation = self._simulation(policy)
        return None if simulation is None else simulation.peak_bytes

    def line(self, policy: Policy) -> Bytes | None:
        """Bytes held at every event of the baseline, had it run under `policy`; None: as with the peak."""
        _, simulation = self._simulation(policy)
        return None if simulation is None else simulation.line

    def step(self, policy: Policy) -> Measurement | None:
        """The timeline of `policy` with its frees and reruns, event by event; None: as with the peak."""
        baseline, simulation = self._simulation(policy)
        return predicted_step(baseline, policy, simulation) if simulation and baseline else None

    def at_peak(self, policy: Policy) -> Ledger | None:
        """Everything held at the peak of the baseline, had it run under `policy`; None: as with the peak."""
        baseline, simulation = self._simulation(policy)
        return _ledger_at_peak(baseline, simulation) if simulation and baseline else None

    def _simulation(self, policy: Policy) -> tuple[Measurement | None, Simulation | None]:
        """The simulation of `policy`, and the step that it changes; None if no peak is predicted."""
        replay = self._replay_of(policy)
        if replay is None or not_predicted(policy, self._graph, self.baseline):
            return None, None
        offloaded, rest = _parted(policy)
        if offloaded:
            return self._with_offload(offloaded)[0]._simulation(rest)
        return self.baseline, self._simulate(replay, policy, self._calls(replay, policy))

    def _replay_of(self, policy: Policy) -> Replay | None:
        """The replay; None if the timeline does not show the results that units of `policy` would keep."""
        replay = self.replay
        if replay is None:
            return None
        keeping = {unit.save_ops for unit in policy.units if unit.save_ops}
        return None if any(results_unknown(replay, save_ops) for save_ops in keeping) else replay

    def _simulate(self, replay: Replay, policy: Policy, calls: Mapping[Unit, Sequence[SavedByCall]]) -> Simulation:
        assert self.baseline is not None, "it was replayed"
        nest = nest_of(policy, calls, self._graph, stash_bytes=stash_bytes(self.baseline, policy))
        return simulate(replay, nest, self.baseline.forward_end_tick)

    def _calls(self, replay: Replay, policy: Policy) -> Mapping[Unit, list[SavedByCall]]:
        options = replace(policy, units=())
        calls = {}
        for unit, children in inside(policy).items():
            named = tuple(fqn for child in children for fqn in child.blocks)
            if (unit, options, named) not in self._saved:
                self._saved[unit, options, named] = calls_of(replay, self._graph, unit, policy, named)
            calls[unit] = self._saved[unit, options, named]
        return calls


def _parted(policy: Policy) -> tuple[tuple[Unit, ...], Policy]:
    """The offloaded units of `policy`, and `policy` without them."""
    units = tuple(unit for unit in policy.units if unit.action == "offload")
    return units, replace(policy, units=tuple(unit for unit in policy.units if unit not in units))


def _freed_bytes(
    simulation: Simulation, policy: Policy, calls_of_units: Mapping[Unit, Sequence[SavedByCall]], border: int
) -> dict[str, int]:
    """Bytes freed in each block by `border`, the end of forward, minus the generator state of its checkpoints."""
    replay, outer, freed = simulation.replay, units_around(policy), dict[str, int]()
    keeps, away = dict[str, int](), dict[Unit, Bytes]()
    for unit, calls in calls_of_units.items():
        entries = joined([call.entries for call in calls])
        away[unit] = entries[simulation.away[entries]]
        if len(unit.blocks) == 1:  # a segment is run by the container around it
            n_waiting = sum(call.first <= border < call.backward_ends for call in calls)
            keeps[unit.blocks[0]] = simulation.nest.stash_bytes * n_waiting
    for unit, calls in calls_of_units.items():
        entries = away[(unit, *outer[unit])[-1]]
        alone = not outer[unit] and len(unit.blocks) == 1  # then all entries belong to the block
        longer = [
            entry for call in calls for entry, first, end in call.kept_results
            if first <= border < end and replay.died[entry] <= border
        ]  # fmt: skip
        for fqn in unit.blocks:
            inner = [name for name in keeps if is_within(name, fqn)] if any(outer.values()) else [fqn]
            state_bytes = sum(keeps.get(name, 0) for name in inner)
            state_bytes += replay.born_in(fqn, ints(longer)) if longer else 0
            freed[fqn] = (int(replay.size[entries].sum()) if alone else replay.born_in(fqn, entries)) - state_bytes
    return freed


def inside(policy: Policy) -> dict[Unit, list[Unit]]:
    """The units directly inside each unit of `policy`."""
    children: dict[Unit, list[Unit]] = {unit: [] for unit in policy.units}
    for unit, around in units_around(policy).items():
        if around:
            children[around[0]].append(unit)
    return children


def _ledger_at_peak(baseline: Measurement, simulation: Simulation) -> Ledger:
    """The ledger at the peak of the predicted line.

    Bytes that a rerun allocates are counted under its block with the role `recomputed`.
    """
    assert baseline.allocations is not None, "it was replayed"
    line = simulation.line
    tick, peak = int(line.argmax()), int(line.max())
    again = next((block for block, at in zip(simulation.nest.names, simulation.reruns()) if at == (tick, peak)), "")
    cells = cells_of(baseline.allocations, np.flatnonzero(simulation.held_at(tick)))
    measured = ledger(baseline, tick)
    if again:
        measured = replace(measured, phase="recompute", phase_block=again)
    if rest := peak - sum(cell.n_bytes for cell in cells):  # beside a rerun: the generators' states that are kept
        role: Role = "recomputed" if again else "unattributed"
        cells += (LedgerCell(role=role, block=again, n_bytes=rest, n_allocations=0, largest_op=""),)
    return replace(measured, cells=tuple(sorted(cells, key=lambda cell: -cell.n_bytes)))


def prices(
    measurement: Measurement, blocks: Iterable[str] | None = None, *, graph: ModelGraph | None = None
) -> tuple[Price, ...]:
    """Prices of recomputing the kept `blocks`, by default every block that saves something.

    Blocks above, below or inside a recomputed unit have no price of their own: toggling one changes the unit. Empty
    where nothing can be replayed.

    Origin: predicted; calls.py lists the limits. Without `graph` FLOPs do not know where recompute stops
    early.
    """
    measurement = next_step(measurement)
    graph = graph_under(measurement, graph)
    replay = Replay.of(measurement, graph)
    if replay is None:
        return ()
    units = measurement.spec.policy.units
    unit_of = {fqn: unit for unit in units for fqn in unit.blocks}
    holders = set(above(*unit_of))
    fqns = [cost.fqn for cost in measurement.blocks if cost.saved_after_forward_bytes] if blocks is None else blocks
    priced = [
        _if_recomputed(measurement, replay, fqn, graph)
        for fqn in dict.fromkeys(fqns)
        if fqn
        and fqn not in holders
        and nearest_around(fqn, unit_of) is None
        and not run_again_by_the_model(Policy.recompute([fqn]), graph)
    ]
    return tuple(price for price in priced if price is not None)


def _if_recomputed(measurement: Measurement, replay: Replay, fqn: str, graph: ModelGraph | None) -> Price | None:
    unit = Unit(blocks=(fqn,))
    policy = replace(measurement.spec.policy, units=(unit,))
    calls = calls_of(replay, graph, unit, policy)
    if not any(len(call.entries) for call in calls) or fqn not in measurement.by_fqn:
        return None
    part, calls = only_of(replay, calls)
    nest = nest_of(policy, {unit: calls}, graph, stash_bytes=stash_bytes(measurement, policy))
    peak = simulate(part, nest, None).peak_bytes
    flops = rerun_flops(measurement, graph, (fqn,), policy)
    return _price(measurement, (fqn,), "recompute", peak - int(replay.line.max()), flops)


def prices_of_keeping(measurement: Measurement, graph: ModelGraph | None = None) -> Iterator[Price]:
    """Prices of keeping each recomputed unit, from forecasts with and without the unit on the keep-all baseline.

    Nested units have no price, and no unit of a run without such a baseline has one.
    """
    policy = measurement.spec.policy
    around = units_around(policy)
    nested = {unit for unit in policy.units if around[unit]}.union(*around.values())
    forecaster = Forecaster(measurement, graph)
    whole = forecaster.peak_bytes(policy) if policy.units else None
    if whole is None:
        return
    for unit in policy.units:
        costs = costs_of(measurement, unit.blocks)
        others = tuple(other for other in policy.units if other is not unit)
        without = forecaster.peak_bytes(replace(policy, units=others))
        ran_again = any(cost.n_recompute for cost in costs)
        if unit not in nested and without is not None and ran_again and len(costs) == len(unit.blocks):
            flops = sum(cost.recompute_flops for cost in costs)
            yield _price(measurement, unit.blocks, "keep", without - whole, flops)


def _price(
    measurement: Measurement, blocks: Fqns, toggle: Literal["recompute", "keep"], change_bytes: int, flops: int
) -> Price:
    log, total = measurement.allocations, measurement.total_flops
    assert log is not None, "it was replayed"
    return Price(
        blocks=blocks,
        toggle=toggle,
        peak_bytes=max(log.held_bytes) + change_bytes,
        peak_change_bytes=change_bytes,
        share_of_step_flops=flops / total if total else None,
    )
