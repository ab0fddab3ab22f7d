"""Measured results and their relation to the drawn policy: the facts behind strip, graph and charts."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from explorer.plan.memory.ledger import ledger
from explorer.plan.predict.baseline import keep_all_from
from explorer.record.allocations import Ledger
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Plan
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec
from explorer.ui.explore import work
from explorer.ui.explore.work import EarlierRun, ExploreState
from explorer.ui.session.repository import KeyedRun, runs
from explorer.ui.shared import draft as drafts
from explorer.view.drawing.figure import Cursor
from explorer.view.text.explore import Freshness
from explorer.view.text.runs import did_not_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Measured results, and whether they are about the drawn policy. Computed once a rerun."""

    comparison: Comparison | None
    baseline: Measurement | None
    baseline_key: str | None
    stale: bool
    graph: ModelGraph | None = None
    """The drawn model, if described."""
    keep_all: KeyedRun | None = None
    """The run that kept everything. Forecasts start from this run."""
    did_not_fit: str = ""
    """Sentence on runs out of memory, and on the baseline put together from the run that fitted."""
    stand_in: EarlierRun | None = None
    """The run shown as `baseline` until this machine has measured the model; None: the baseline answers the draft."""
    is_running: bool = False
    """Whether a job of the page is under way."""
    being_timed: bool = False
    """Whether the baseline is a part of a run that goes on: recorded, without times."""
    plans: tuple[Plan, ...] = ()
    """Plans of the stand-in, until the front of this machine's own run can be searched."""
    predicted: bool = False
    """True if nothing ran: the baseline was simulated without data."""
    ranks: RecordedRanks | None = None
    """All ranks of the baseline, which is the fullest rank of them."""
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
    def baseline_policy(self) -> Policy | None:
        """The policy of the baseline if it did not keep everything: an opened run, or the run that fitted."""
        fresh = self.comparison is not None and not self.stale
        run = self.comparison.baseline if fresh and self.comparison is not None else self.baseline
        return run.spec.policy if run is not None and run.spec.policy.units else None

    @property
    def against(self) -> str:
        """Words for the baseline of measured figures; empty if the baseline kept everything."""
        if self.baseline_policy is None:
            return ""
        return "what fitted" if self.did_not_fit else "the opened run"

    @property
    def freshness(self) -> Freshness:
        if self.comparison is None:
            return self._freshness_of_baseline()
        if self.predicted:
            return Freshness.PREDICTED_STALE if self.stale else Freshness.PREDICTED_FRESH
        if self.stale:
            return Freshness.STALE
        return Freshness.FRESH if self.comparison.comparable else Freshness.FAILED

    def _freshness_of_baseline(self) -> Freshness:
        if self.baseline is None:
            return Freshness.NOTHING
        if self.stand_in is not None:
            return Freshness.STAND_IN
        if self.being_timed and self.baseline.times is None:
            return Freshness.BEING_TIMED
        if self.predicted:
            return Freshness.PREDICTED_OTHER_OPTIONS if self.other_options else Freshness.PREDICTED_BASELINE
        if self.baseline.spec.model.is_recorded or self.baseline.spec.ranks is not None:
            return Freshness.RECORDED
        if self.other_options:
            return Freshness.OTHER_OPTIONS
        return Freshness.OPENED if self.baseline.spec.policy.units else Freshness.BASELINE


def view_of(state: ExploreState) -> View:
    """The last comparison, and the baseline of the drawn run."""
    comparison: Comparison | None = work.result(state, "shown")
    spec, expected = state.draft.spec, work.baseline_spec(state)
    record = work.result(state, "baseline")
    baseline, key = _run_of(record, expected), state.baseline
    fitted = baseline is not None and baseline.refused and baseline.complete
    priced = baseline is not None and baseline.times is not None and baseline.times.checkpoint_ms is not None
    if (
        comparison is not None
        and comparison.baseline.spec == expected
        and not (fitted or priced or state.draft.predict)
    ):
        baseline, key = comparison.baseline, state.shown
    graph, being_timed = drawn_graph(state), baseline is not None and key == work.part_key(state.job.id)
    missing = baseline is None and comparison is None
    stand_in = _stand_in(state, graph) if missing or being_timed else None
    plans = stand_in.plans if stand_in is not None else ()
    if stand_in is not None and missing:
        key, baseline = stand_in.key, stand_in.run
    keep_all = KeyedRun(key, baseline) if baseline is not None and key is not None else None
    complete = _completed(keep_all)
    refused = did_not_fit(baseline, complete) if baseline is not None and baseline.refused else ""
    if complete is not None:
        keep_all = KeyedRun(f"complete {key}", complete)
        if baseline is not None and baseline.refused:
            key, baseline = keep_all
    same_options = replace(spec, policy=baseline.spec.policy) if baseline else None
    return View(
        comparison=comparison,
        baseline=baseline,
        baseline_key=key,
        stale=comparison is not None and comparison.candidate.spec != spec,
        graph=graph,
        keep_all=keep_all,
        ranks=record if isinstance(record, RecordedRanks) else None,
        other_options=baseline is not None and baseline.spec != same_options,
        did_not_fit=refused,
        stand_in=stand_in if missing else None,
        is_running=state.job.id is not None,
        being_timed=being_timed,
        plans=plans,
        predicted=state.draft.predict,
    )


def drawn_graph(state: ExploreState) -> ModelGraph | None:
    """The graph of the drawn model: described here, else that of the stand-in."""
    graph = drafts.graph_of(state.draft)
    if graph is None and (stand_in := _stand_in(state, None)) is not None:
        return stand_in.run.graph
    return graph


def _stand_in(state: ExploreState, graph: ModelGraph | None) -> EarlierRun | None:
    """The stand-in of the drawn run; None if the model has another structure by now (`graph`, once described)."""
    draft = state.draft
    if draft.predict or draft.spec.model.is_recorded:
        return None
    stand_in = work.stand_in(replace(draft.spec, policy=KEEP_ALL, plan=None))
    there = stand_in.run.graph if stand_in is not None else None
    return None if there is None or (graph is not None and graph.fingerprint != there.fingerprint) else stand_in


def _completed(keyed: KeyedRun | None) -> Measurement | None:
    """The run that keeps everything, put together from a run that fitted under a policy or was recorded with a policy.
    None if the run kept everything itself."""
    if keyed is None or not keyed.run.complete:
        return None
    run = keyed.run
    if not (run.refused or (run.origin == "recorded" and run.spec.policy.units)):
        return None
    graph = runs().graph(run.spec)
    return runs().complete.get_or_make(keyed.key, lambda: keep_all_from(run, graph) if graph is not None else None)


def _run_of(record: Measurement | Comparison | RecordedRanks | None, spec: RunSpec) -> Measurement | None:
    """The run of `spec` in a record of one or two runs."""
    if isinstance(record, Comparison):
        return next((run for run in (record.baseline, record.candidate) if run.spec == spec), record.baseline)
    return record.as_run if record is not None else None


def ledger_of(baseline: Measurement | None, candidate: Measurement | None, picked: Cursor) -> Ledger | None:
    """Bytes alive at the picked point; None without a picked point or without a timeline."""
    if picked is None:
        return None
    run = candidate if picked[0] == "candidate" else baseline
    if run is None or run.allocations is None or picked[1] > run.allocations.n_ticks:
        return None
    return ledger(run, picked[1])
