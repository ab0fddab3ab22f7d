"""A whole policy played through a measured run: below the time that a person notices, before anything runs.

See changes.py for what is played, nesting.py for units inside units, saved_by_call.py for what is not foreseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from explorer.plan.forecast.actions import PlayedStep, calls_of, results_unknown
from explorer.plan.forecast.at_peak import ledger_at_peak
from explorer.plan.forecast.changes import Played, changes_of, joined, line_with, peak_with, reruns, stash_bytes
from explorer.plan.forecast.keep_all import keep_all_from
from explorer.plan.forecast.nesting import enclosing, nest_of
from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.rerun_flops import unit_flops
from explorer.plan.forecast.rerun_time import time_ratio
from explorer.plan.forecast.saved_by_call import SavedByCall
from explorer.plan.forecast.unforeseen import trains_nothing, unforeseen
from explorer.plan.memory.series import Bytes
from explorer.plan.names import is_within
from explorer.record.forecast import Forecast
from explorer.record.graph import ModelGraph
from explorer.record.ledger import Ledger
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit


class Forecaster:
    """Holds one baseline sorted for replay, and what each unit of it would free; built once, asked at every toggle.

    `run` is any complete run of the step: of one with recompute the keep-all baseline is put together first.
    """

    def __init__(self, run: Measurement, graph: ModelGraph | None = None) -> None:
        self.baseline = keep_all_from(run, graph)
        """None: cannot be put together from `run`, and nothing is forecast."""
        self._graph = graph
        self._replay = None if self.baseline is None else Replay.of(self.baseline, graph)
        self._saved: dict[tuple[Unit, Policy, tuple[str, ...]], list[SavedByCall]] = {}

    def forecast(self, policy: Policy) -> Forecast:
        """What `policy` should do to the baseline; what cannot be said is None, see unforeseen.py for the reason."""
        replay, baseline = self._replay, self.baseline
        if baseline is None or trains_nothing(policy, self._graph):
            return Forecast()
        if replay is None or self._results_unknown(replay, policy):
            return Forecast(flop_ratio=self._flop_ratio(baseline, policy))
        units = self._units(replay, policy)
        nest, stash = nest_of(policy, units, self._graph), stash_bytes(baseline, policy)
        played = changes_of(replay, nest, baseline.forward_end_tick, stash_bytes=stash)
        saved, unknown = baseline.saved_after_forward_bytes, unforeseen(policy, self._graph)
        if unknown and any(unit.action != "recompute" for unit in policy.units):
            return Forecast(flop_ratio=self._flop_ratio(baseline, policy))
        timed = time_ratio(baseline, self._graph, inside(policy), policy)
        return Forecast(
            step_peak_bytes=None if unknown else peak_with(replay, played, nest, stash_bytes=stash),
            saved_after_forward_bytes=None if saved is None else saved + played.saved_bytes,
            flop_ratio=self._flop_ratio(baseline, policy),
            time_ratio=None if timed is None else timed[0],
            time_ratio_spread=None if timed is None else timed[1],
            freed_bytes=self._freed(replay, units, played, policy),
        )

    def peak_bytes(self, policy: Policy) -> int | None:
        """The peak alone of what `forecast` says."""
        replay, baseline = self._replay, self.baseline
        if baseline is None or replay is None or trains_nothing(policy, self._graph):
            return None
        if self._results_unknown(replay, policy) or unforeseen(policy, self._graph):
            return None
        nest, stash = nest_of(policy, self._units(replay, policy), self._graph), stash_bytes(baseline, policy)
        played = changes_of(replay, nest, baseline.forward_end_tick, stash_bytes=stash)
        return peak_with(replay, played, nest, stash_bytes=stash)

    def line(self, policy: Policy) -> Bytes | None:
        """Bytes held at every event of the baseline, had it run under `policy`; None: as with the peak."""
        replay, baseline = self._replay, self.baseline
        if baseline is None or replay is None or self.peak_bytes(policy) is None:
            return None
        units = self._units(replay, policy)
        nest, stash = nest_of(policy, units, self._graph), stash_bytes(baseline, policy)
        played = changes_of(replay, nest, baseline.forward_end_tick, stash_bytes=stash)
        return line_with(replay, played, nest, stash_bytes=stash)

    def at_peak(self, policy: Policy) -> Ledger | None:
        """Everything held at the peak of the baseline, had it run under `policy`; None: as with the peak."""
        replay, baseline = self._replay, self.baseline
        if baseline is None or replay is None or self.peak_bytes(policy) is None:
            return None
        units = self._units(replay, policy)
        nest, stash = nest_of(policy, units, self._graph), stash_bytes(baseline, policy)
        played = changes_of(replay, nest, baseline.forward_end_tick, stash_bytes=stash)
        block_of = {id(call): unit.blocks[0] for unit, calls in units.items() for call in calls}
        blocks = [block_of[id(call)] for call in nest.calls]
        moments = [(block, *at) for block, at in zip(blocks, reruns(replay, played, nest, stash_bytes=stash))]
        line = line_with(replay, played, nest, stash_bytes=stash)
        return ledger_at_peak(baseline, replay, played, line, moments)

    def _results_unknown(self, replay: Replay, policy: Policy) -> bool:
        return any(unit.save_ops and results_unknown(replay, unit.save_ops) for unit in policy.units)

    def _freed(
        self, replay: Replay, units: Mapping[Unit, Sequence[SavedByCall]], played: Played, policy: Policy
    ) -> dict[str, int]:
        """What leaves each block, less what its checkpoints keep of the generators by the end of forward."""
        outer, freed = enclosing(policy), {}
        assert self.baseline is not None, "it was replayed"
        stash, border = stash_bytes(self.baseline, policy), self.baseline.forward_end_tick or 0
        keeps = {
            unit.blocks[0]: stash * sum(call.first <= border < call.ends for call in own)
            for unit, own in units.items()
            if len(unit.blocks) == 1 and unit.action != "offload"  # a segment is run by the container around it
        }
        own = self._away(replay, units, played)
        for unit in units:
            top = unit
            while top in outer:
                top = outer[top]
            entries = own[top]
            alone = top is unit and len(unit.blocks) == 1  # then all of it is its own
            longer = [
                entry for call in units[unit] for entry, first, end in call.held
                if first <= border < end and replay.died[entry] <= border
            ]  # fmt: skip
            for fqn in unit.blocks:
                kept = sum(keeps[one] for one in keeps if is_within(one, fqn)) if outer else keeps.get(fqn, 0)
                kept += replay.born_in(fqn, np.array(longer, dtype=np.int64)) if longer else 0
                freed[fqn] = (int(replay.size[entries].sum()) if alone else replay.born_in(fqn, entries)) - kept
        return freed

    @staticmethod
    def _away(replay: Replay, units: Mapping[Unit, Sequence[SavedByCall]], played: Played) -> dict[Unit, Bytes]:
        """Of each unit the entries of its calls that have left by the end of forward; all units in one go."""
        entries = joined([call.entries for calls in units.values() for call in calls])
        away = played.away[entries]
        ends = np.cumsum([sum(len(call.entries) for call in calls) for calls in units.values()], dtype=np.int64)
        borders = np.concatenate(([0], np.cumsum(away)))[np.concatenate(([0], ends))].tolist()
        left = entries[away]
        return {unit: left[first:end] for unit, first, end in zip(units, borders, borders[1:])}

    def _units(self, replay: Replay, policy: Policy) -> dict[Unit, list[SavedByCall]]:
        assert self.baseline is not None, "it was replayed"
        step = PlayedStep(replay=replay, graph=self._graph, on_gpu=self.baseline.environment.device != "cpu")
        offloaded = tuple(unit for unit in policy.units if unit.action == "offload")
        options = msgspec.structs.replace(policy, units=offloaded)
        found = {}
        for unit, children in inside(policy).items():
            named = tuple(fqn for child in children for fqn in child.blocks)
            if (unit, options, named) not in self._saved:
                self._saved[unit, options, named] = calls_of(step, unit, policy, named)
            found[unit] = self._saved[unit, options, named]
        return found

    def _flop_ratio(self, baseline: Measurement, policy: Policy) -> float | None:
        total = baseline.total_flops
        again = [unit_flops(baseline, self._graph, unit, children, policy) for unit, children in inside(policy).items()]
        known = [flops for flops in again if flops is not None]
        return 1 + sum(known) / total if total and len(known) == len(again) else None


def inside(policy: Policy) -> dict[Unit, list[Unit]]:
    """Every unit, and the units whose innermost holder it is."""
    children: dict[Unit, list[Unit]] = {unit: [] for unit in policy.units}
    for unit, holder in enclosing(policy).items():
        children[holder].append(unit)
    return children
