"""Measured results and their relation to the drawn policy, and predictions: the facts behind strip, graph and charts.

A stored forecaster answers every toggle: peak, cost and saved bytes of policies, and prices of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from explorer.errors import InvalidPolicy
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.ledger import Bytes, ledger
from explorer.plan.policy.counted import counted_units
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster, prices
from explorer.plan.predict.step_cost import TimedStep, calibrated, error_of_median
from explorer.record.allocations import Ledger
from explorer.record.card import CardMemory
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Forecast, Plan, Price
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec
from explorer.ui.explore import work
from explorer.ui.explore.work import EarlierRun, ExploreState
from explorer.ui.session.repository import KeyedRun, request_key, runs
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import with_units
from explorer.view.compare.front import CostWord
from explorer.view.drawing.figure import Cursor
from explorer.view.drawing.units import MINUS, mib, percent
from explorer.view.text.explore import PageAnswer
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
    is_part: bool = False
    """Whether the comparison is a part of a run: recorded steps, perhaps judged gradients, and no times."""
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
    def charted_candidate(self) -> Measurement | None:
        """The candidate of the charts: of the last comparison, also if another policy is drawn now."""
        return self.comparison.candidate if self.comparison is not None else None

    @property
    def start(self) -> Measurement | None:
        """The run that kept everything."""
        return self.keep_all.run if self.keep_all is not None else None

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
    def imaginary_card(self) -> str:
        """Name of the card that the figures come from, if the card is imaginary; else empty."""
        name = self.charted.environment.device_name if self.charted is not None else ""
        return name if name.endswith("(imaginary)") else ""

    @property
    def answer(self) -> PageAnswer:
        """What the figures are. Nothing else decides it."""
        pair, run = self.comparison, self.baseline
        if pair is not None and self.predicted:
            return PageAnswer("predicted", "both runs", is_current=not self.stale)
        if pair is not None and self.stale:
            return PageAnswer("measured", "both runs", is_current=False)
        if pair is not None and self.is_part and pair.comparable:
            return PageAnswer("measured", "part of both runs", failed=not self.is_running)
        if pair is not None:
            return PageAnswer("measured", "both runs", failed=not pair.comparable)
        if run is None:
            return PageAnswer("none")
        if self.stand_in is not None:
            return PageAnswer("another machine")
        if self.being_timed and run.times is None:
            return PageAnswer("measured", "part of the baseline")
        if self.predicted:
            return PageAnswer("predicted", is_current=not self.other_options)
        if run.spec.model.is_recorded or run.spec.ranks is not None:
            return PageAnswer("recorded")
        if self.other_options:
            return PageAnswer("measured", is_current=False)
        if run.spec.policy.units and run.complete:
            return PageAnswer("measured", "opened run")
        return PageAnswer("measured", failed=not run.complete)


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
    stand_in = work.stand_in(state, graph) if missing or being_timed else None
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
        is_part=comparison is not None and (state.shown or "").startswith(work.PART),
        plans=plans,
        predicted=state.draft.predict,
    )


def drawn_graph(state: ExploreState) -> ModelGraph | None:
    """The graph of the drawn model: described here, else that of the stand-in."""
    graph = drafts.graph_of(state.draft)
    if graph is None and (stand_in := work.stand_in(state, None)) is not None:
        return stand_in.run.graph
    return graph


def _completed(keyed: KeyedRun | None) -> Measurement | None:
    """The run that keeps everything, put together from a run that fitted under a policy or was recorded with a policy.
    None if the run kept everything itself."""
    if keyed is None or not keyed.run.complete:
        return None
    run = keyed.run
    if not (run.refused or (run.origin == "recorded" and run.spec.policy.units)):
        return None
    graph = runs().graph(run.spec)
    if graph is None:
        return None
    return runs().once("completed run", keyed.key, lambda: keep_all_from(run, graph))


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


def _forecaster(view: View) -> Forecaster | None:
    # A forecaster replays a step that kept everything; the graph says where recompute stops.
    start, graph = view.keep_all, view.graph
    if start is None or not start.run.complete or graph is None or start.run.spec.policy.units:
        return None
    return runs().once("forecaster", start.key, lambda: Forecaster(start.run, graph))


def predicted_line(view: View, policy: Policy) -> Bytes | None:
    """Predicted bytes of `policy` at every event of the run that kept everything; None without a forecaster or a
    recomputed unit."""
    forecaster = _forecaster(view)
    return forecaster.line(policy) if forecaster is not None and policy.units else None


def predicted_on_card(view: View, policy: Policy) -> CardMemory | None:
    """What the card holds in the predicted step of `policy`; None without a card, and as with `predicted_line`."""
    forecaster, start = _forecaster(view), view.keep_all
    if forecaster is None or start is None or not policy.units or (of_start := start.run.card) is None:
        return None

    def make() -> CardMemory | None:
        step = forecaster.step(policy)
        return None if step is None else memory_on(of_start.card, step, others=())

    return runs().once("on card", f"{start.key} {request_key(policy)}", make)


def predicted(view: View, policy: Policy) -> Forecast:
    """Forecast of `policy` from the run that kept everything, with ratios against the page's baseline."""
    forecast = calibrated(_uncalibrated(view, policy), _measured_steps(view))
    start, base = view.start, view.baseline
    if start is None or base is None or start is base:
        return forecast
    return replace(
        forecast,
        flop_ratio=_rebased(forecast.flop_ratio, start.total_flops, base.total_flops),
        time_ratio=_rebased(forecast.time_ratio, _step_ms(start), _step_ms(base)),
    )


def planned_time(view: View, more_time: float) -> tuple[float, float]:
    """A limit of the page's time as the planner counts it: extra time over everything kept, and the scale of that time.

    The headline's time is calibrated by measured steps and relative to the page's baseline. The planner has neither.
    """
    start, base = view.start, view.baseline
    whole, of_base = (_step_ms(run) if run is not None else None for run in (start, base))
    if start is not base and whole and of_base:
        more_time = max((1 + more_time) * of_base / whole - 1, 0.0)
    # Calibration scales the extra time of every policy by one factor: that of a step which takes twice as long.
    twice = calibrated(Forecast(time_ratio=2.0), _measured_steps(view)).time_ratio
    return more_time, (twice or 2.0) - 1


def _uncalibrated(view: View, policy: Policy) -> Forecast:
    forecaster, start = _forecaster(view), view.keep_all
    if forecaster is None or start is None:
        return Forecast()
    key = f"{start.key} {request_key(policy)}"
    return runs().once("forecast", key, lambda: forecaster.forecast(policy))


def _measured_steps(view: View) -> tuple[TimedStep, ...]:
    """Whole steps of other policies, each measured in turns with everything kept."""
    start = view.start
    if start is None or start.times is None:
        return ()
    n_steps = len(start.times.step.ms)
    forecasts = ((point, _uncalibrated(view, point.policy)) for point in runs().points(start.spec))
    return tuple(
        TimedStep(
            predicted=forecast.time_ratio,
            measured=point.time_ratio,
            error=error_of_median(point.time_spread, n_steps),
            calls=forecast.time_ratio_of_calls or 0.0,
        )
        for point, forecast in forecasts
        if forecast.time_ratio is not None and point.time_spread is not None
    )


def _rebased(ratio: float | None, whole: float | None, base: float | None) -> float | None:
    """A ratio to everything kept, as a ratio to the baseline."""
    return ratio * whole / base if ratio is not None and whole and base else None


def _step_ms(run: Measurement) -> float | None:
    return run.times.step.median_ms if run.times else None


def cost(view: View, forecast: Forecast) -> float | None:
    """Step time over the time with everything kept; the FLOPs ratio if no step is timed. Never a mixture of both."""
    return forecast.time_ratio if cost_word(view) == "time" else forecast.flop_ratio


def cost_word(view: View) -> CostWord:
    """Quantity that `cost` counts: FLOPs if the step did not fit and so has no times."""
    return "time" if view.start is None or view.start.times is not None else "FLOPs"


def predicted_presets(view: View, policy: Policy) -> dict[str, tuple[Policy, Forecast]]:
    """The presets of the menu by name: each as a policy with the options of `policy`, and its forecast.

    A preset that chooses no block of this model, or the same blocks as a preset before it, is absent.
    """
    graph, start = view.graph, view.keep_all.key if view.keep_all else None
    if graph is None:
        return {}

    def make() -> dict[str, tuple[Policy, Forecast]]:
        chosen: dict[tuple[Unit, ...], str] = {(): "keep-all"}
        for name in preset_titles():
            chosen.setdefault(_units_of(name, graph), name)
        policies = {name: with_units(policy, units) for units, name in chosen.items()}
        return {name: (policy, predicted(view, policy)) for name, policy in policies.items()}

    options = request_key(with_units(policy, ()))
    key = f"{start} {view.baseline_key} {graph.fingerprint} {options} {_measured_steps(view)}"
    return runs().once("presets", key, make)


def _units_of(name: str, graph: ModelGraph) -> tuple[Unit, ...]:
    try:
        return preset(name, graph).units
    except InvalidPolicy:  # no block of this model is worth recomputing by itself
        return ()


def worth_recomputing(graph: ModelGraph) -> frozenset[str]:
    """The blocks that a preset would choose from; counted once for a model."""
    return runs().once(
        "worth recomputing", graph.fingerprint, lambda: frozenset(fqn for unit in counted_units(graph) for fqn in unit)
    )


def block_prices(start: KeyedRun | None, graph: ModelGraph, fqns: Iterable[str]) -> dict[str, Price]:
    """Prices of toggling those blocks of `fqns` on a measured run that save something, by fqn.

    Prices of all blocks of a large model take seconds: a click would wait for them.
    """
    if start is None:
        return {}
    priced, costs = runs().once("prices", start.key, dict[str, Price | None]), start.run.by_fqn
    saving = [fqn for fqn in fqns if fqn in costs and costs[fqn].saved_after_forward_bytes]
    if missing := [fqn for fqn in saving if fqn not in priced]:
        by_fqn = {price.blocks[0]: price for price in prices(start.run, missing, graph=graph)}
        priced.update((fqn, by_fqn.get(fqn)) for fqn in missing)
    return {fqn: price for fqn in saving if (price := priced[fqn]) is not None}


def price_tag(price: Price) -> str:
    """Effect of a toggle in a few words: `peak −12 MiB for +1 % FLOPs`."""
    moved = price.peak_change_bytes
    sign = MINUS if moved < 0 else "+"
    peak = f"peak {sign}{mib(abs(moved))}" if moved else "peak unchanged"
    share = price.share_of_step_flops
    return peak if not share or share < 0.0005 else f"{peak} for {percent(share, signed=True)} FLOPs"
