"""Measured results and their relation to the drawn policy: the facts behind strip, graph and charts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from explorer.errors import InvalidPolicy
from explorer.plan.hazards.hazards import hazards
from explorer.plan.memory.ledger import ledger
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.step_cost import TimedStep, calibrated, error_of_median
from explorer.record.allocations import Ledger
from explorer.record.base import to_json
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import RunSpec
from explorer.ui.explore import work
from explorer.ui.explore.forecast import forecast, price_figures, price_tags
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import backend
from explorer.ui.session import known as known_runs
from explorer.ui.shared.draft import with_units
from explorer.view.compare.front import CostWord
from explorer.view.graph import overlay
from explorer.view.graph.labels import Facts
from explorer.view.graph.overlay import Overlay
from explorer.view.text.runs import did_not_fit

Picked = tuple[str, int] | None
"""Run and tick of a point in the timeline."""


class Freshness(StrEnum):
    """Relation of the figures to the drawn policy; `glossary.FRESHNESS` has a sentence for each."""

    NOTHING = "nothing"
    BASELINE = "baseline"
    PINNED = "pinned"
    RECORDED = "recorded"
    OTHER_OPTIONS = "other options"
    FRESH = "fresh"
    STALE = "stale"
    FAILED = "failed"
    PREDICTED_BASELINE = "predicted baseline"
    PREDICTED_OTHER_OPTIONS = "predicted, other options"
    PREDICTED_FRESH = "predicted, fresh"
    PREDICTED_STALE = "predicted, stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Measured results, and whether they are about the drawn policy."""

    comparison: Comparison | None
    baseline: Measurement | None
    baseline_key: str | None
    stale: bool
    kept: Measurement | None = None
    """The run that kept everything, beside a pinned baseline. Forecasts start from this run."""
    kept_key: str | None = None
    did_not_fit: str = ""
    """Sentence on runs out of memory, and on the baseline put together from the run that fitted."""
    foreseen: bool = False
    """True if nothing ran: the baseline was simulated without data."""
    other_options: bool = False
    """Whether options, seed or device have changed since the baseline ran."""

    @property
    def charted(self) -> Measurement | None:
        """The baseline of the charts: the comparison's baseline, else the current baseline."""
        return self.comparison.baseline if self.comparison is not None else self.baseline

    @property
    def candidate(self) -> Measurement | None:
        """The candidate run, if it ran to its end under the drawn policy."""
        pair = self.comparison
        return pair.candidate if pair is not None and pair.comparable and not self.stale else None

    @property
    def pinned(self) -> Policy | None:
        """The policy of the baseline, if the baseline did not keep everything."""
        fresh = self.comparison is not None and not self.stale
        run = self.comparison.baseline if fresh and self.comparison is not None else self.baseline
        return run.spec.policy if run is not None and run.spec.policy.units else None

    @property
    def against(self) -> str:
        """Words for the baseline of measured figures; empty if the baseline kept everything."""
        if self.pinned is None:
            return ""
        return "what fitted" if self.did_not_fit else "the pinned baseline"

    @property
    def freshness(self) -> Freshness:
        if self.comparison is None:
            return self._freshness_of_baseline()
        if self.foreseen:
            return Freshness.PREDICTED_STALE if self.stale else Freshness.PREDICTED_FRESH
        if self.stale:
            return Freshness.STALE
        return Freshness.FRESH if self.comparison.comparable else Freshness.FAILED

    def _freshness_of_baseline(self) -> Freshness:
        if self.baseline is None:
            return Freshness.NOTHING
        if self.foreseen:
            return Freshness.PREDICTED_OTHER_OPTIONS if self.other_options else Freshness.PREDICTED_BASELINE
        if self.baseline.spec.model.is_recorded:
            return Freshness.RECORDED
        if self.other_options:
            return Freshness.OTHER_OPTIONS
        return Freshness.PINNED if self.baseline.spec.policy.units else Freshness.BASELINE


def shown(state: ExploreState) -> Shown:
    """The last comparison, and the baseline of the drawn run."""
    comparison: Comparison | None = work.result(state, "shown")
    spec = state.draft.spec
    wanted = work.wanted(state)
    baseline, key = _run_of(work.result(state, "baseline"), wanted), state.baseline
    fitted = baseline is not None and baseline.refused and baseline.complete
    if comparison is not None and comparison.baseline.spec == wanted and not (fitted or state.draft.predict):
        baseline, key = comparison.baseline, state.shown
    whole = _whole(baseline, key)
    refused = did_not_fit(baseline, whole) if baseline is not None and baseline.refused else ""
    kept = (key, baseline) if baseline is not None else None
    if whole is not None:
        kept = (f"whole {key}", whole)
    if whole is not None and baseline is not None and baseline.refused:
        baseline, key = whole, f"whole {key}"
    stale = comparison is not None and comparison.candidate.spec != spec
    if wanted.policy.units and whole is None:
        kept = known_runs.measured(msgspec.structs.replace(wanted, policy=KEEP_ALL))
    bare = msgspec.structs.replace(spec, policy=baseline.spec.policy) if baseline else None
    return Shown(
        comparison=comparison,
        baseline=baseline,
        baseline_key=key,
        stale=stale,
        kept=kept[1] if kept else None,
        kept_key=kept[0] if kept else None,
        other_options=baseline is not None and baseline.spec != bare,
        did_not_fit=refused,
        foreseen=state.draft.predict,
    )


def _whole(run: Measurement | None, key: str | None) -> Measurement | None:
    """The run that keeps everything, put together from a run that fitted under a policy or was recorded with a policy.
    None if `run` kept everything itself."""
    if run is None or not run.complete or not (run.refused or (run.origin == "recorded" and run.spec.policy.units)):
        return None
    whole: Measurement | None = backend.records().get(f"whole {key}")
    if whole is None and (graph := backend.graph_of(run.spec)) is not None:
        whole = keep_all_from(run, graph)
        backend.records().keep(f"whole {key}", whole)
    return whole


def _run_of(record: Measurement | Comparison | None, wanted: RunSpec) -> Measurement | None:
    """The run of `wanted` in a record of one or two runs."""
    if isinstance(record, Comparison):
        return next((run for run in (record.baseline, record.candidate) if run.spec == wanted), record.baseline)
    return record


def predicted(known: Shown, graph: ModelGraph | None, policy: Policy) -> Forecast:
    """Forecast of `policy` from the run that kept everything, with ratios against the page's baseline."""
    expected = calibrated(forecast(known.kept, graph, policy, key=known.kept_key), _seen(known, graph))
    if known.kept is None or known.baseline is None or known.kept is known.baseline:
        return expected
    return msgspec.structs.replace(
        expected,
        flop_ratio=_against(expected.flop_ratio, known.kept.total_flops, known.baseline.total_flops),
        time_ratio=_against(expected.time_ratio, _step_ms(known.kept), _step_ms(known.baseline)),
    )


def _seen(known: Shown, graph: ModelGraph | None) -> tuple[TimedStep, ...]:
    """Whole steps of other policies, each measured in turns with everything kept."""
    if known.kept is None or known.kept.times is None:
        return ()
    n_steps = len(known.kept.times.step.ms)
    foretold = (
        (one, forecast(known.kept, graph, one.policy, key=known.kept_key)) for one in known_runs.points(known.kept.spec)
    )
    return tuple(
        TimedStep(
            predicted=expected.time_ratio,
            measured=one.time_ratio,
            error=error_of_median(one.time_spread, n_steps),
            calls=expected.time_ratio_of_calls or 0.0,
        )
        for one, expected in foretold
        if expected.time_ratio is not None and one.time_spread is not None
    )


def _against(ratio: float | None, whole: float | None, base: float | None) -> float | None:
    """A ratio to everything kept, as one to the baseline."""
    return ratio * whole / base if ratio is not None and whole and base else None


def _step_ms(run: Measurement) -> float | None:
    return run.times.step.median_ms if run.times else None


def cost(foreseen: Forecast) -> float | None:
    """Step time over the time with everything kept; the FLOPs ratio if the step is not timed."""
    return foreseen.time_ratio if foreseen.time_ratio is not None else foreseen.flop_ratio


def cost_word(known: Shown) -> CostWord:
    """Quantity that `cost` counts: FLOPs if the step did not fit and so has no times."""
    return "time" if known.kept is None or known.kept.times is not None else "FLOPs"


def predicted_presets(known: Shown, graph: ModelGraph, policy: Policy) -> dict[str, tuple[Policy, Forecast]]:
    """The presets of the menu by name: each as a policy with the options of `policy`, and its forecast.

    A preset that chooses no block of this model is absent.
    """
    key = f"presets {known.kept_key} {known.baseline_key} {graph.fingerprint} {to_json(with_units(policy, ()))!r}"
    key += f" {_seen(known, graph)}"
    presets: dict[str, tuple[Policy, Forecast]] | None = backend.records().get(key)
    if presets is None:
        chosen = {name: with_units(policy, _units_of(name, graph)) for name in preset_titles()}
        presets = {
            name: (one, predicted(known, graph, one)) for name, one in chosen.items() if one.units or name == "keep-all"
        }
        backend.records().keep(key, presets)
    return presets


def _units_of(name: str, graph: ModelGraph) -> tuple[Unit, ...]:
    try:
        return preset(name, graph).units
    except InvalidPolicy:  # no block of this model is worth recomputing by itself
        return ()


def facts(state: ExploreState, graph: ModelGraph, known: Shown, predicted: Forecast) -> Facts:
    """Facts for the labels of the blocks."""
    spec = state.draft.spec
    kept = known.kept or known.baseline
    whole = kept if kept is not None and kept.complete else None
    priced = known.candidate or (whole if not spec.policy.units else None)
    drawn = known.comparison.candidate if known.comparison is not None else None
    key = f"{state.shown if known.candidate else known.kept_key}"
    return Facts(
        graph=graph,
        policy=spec.policy,
        baseline=whole,
        candidate=known.candidate,
        freed_bytes=predicted.freed_bytes,
        prices=price_tags(priced, graph, key=key),
        hazards=hazards(graph, spec.policy, spec.plan, spec),
        alive=ledger_of(known.baseline, drawn, state.tick),
        overlay=_overlay(state.overlay, known, price_figures(priced, graph, key=key)),
    )


def _overlay(what: str, known: Shown, priced: dict[str, float]) -> Overlay | None:
    """The quantity that a person chose to see on the blocks; None: nothing."""
    if what == overlay.NOTHING:
        return None
    if what == overlay.PRICE:
        return overlay.of_prices(priced)
    if what == overlay.DISTANCE:
        return overlay.of_gradients(known.comparison if not known.stale else None)
    return overlay.of_run(what, known.candidate or known.baseline)


def ledger_of(baseline: Measurement | None, candidate: Measurement | None, at: Picked) -> Ledger | None:
    """Bytes alive at the picked point; None without a picked point or without a timeline."""
    if at is None:
        return None
    run = candidate if at[0] == "candidate" else baseline
    if run is None or run.allocations is None or at[1] > run.allocations.n_ticks:
        return None
    return ledger(run, at[1])
