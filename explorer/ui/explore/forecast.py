"""Predicted peak, cost and saved bytes of policies, and prices of blocks. A stored forecaster answers every toggle."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from explorer.errors import InvalidPolicy
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.ledger import Bytes
from explorer.plan.policy.counted import counted_units
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.forecaster import Forecaster, prices
from explorer.plan.predict.step_cost import TimedStep, calibrated, error_of_median
from explorer.record.card import CardMemory
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Price
from explorer.record.policy import Policy, Unit
from explorer.ui.explore.view import View
from explorer.ui.session.repository import KeyedRun, request_key, runs
from explorer.ui.shared.draft import with_units
from explorer.view.compare.front import CostWord
from explorer.view.drawing.units import MINUS, mib, percent


def _forecaster(view: View) -> Forecaster | None:
    # A forecaster replays a step that kept everything; the graph says where recompute stops.
    start, graph = view.keep_all, view.graph
    if start is None or not start.run.complete or graph is None or start.run.spec.policy.units:
        return None
    return runs().forecasters.get_or_make(start.key, lambda: Forecaster(start.run, graph))


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
    memory = runs().on_cards.get(key := f"{start.key} {request_key(policy)}")
    if memory is None and (step := forecaster.step(policy)) is not None:
        memory = memory_on(of_start.card, step, others=())
        runs().on_cards.add(key, memory)
    return memory


def predicted(view: View, policy: Policy) -> Forecast:
    """Forecast of `policy` from the run that kept everything, with ratios against the page's baseline."""
    forecast = calibrated(_uncalibrated(view, policy), _measured_steps(view))
    start, base = view.keep_all.run if view.keep_all else None, view.baseline
    if start is None or base is None or start is base:
        return forecast
    return replace(
        forecast,
        flop_ratio=_rebased(forecast.flop_ratio, start.total_flops, base.total_flops),
        time_ratio=_rebased(forecast.time_ratio, _step_ms(start), _step_ms(base)),
    )


def _uncalibrated(view: View, policy: Policy) -> Forecast:
    forecaster, start = _forecaster(view), view.keep_all
    if forecaster is None or start is None:
        return Forecast()
    key = f"{start.key} {request_key(policy)}"
    return runs().forecasts.get_or_make(key, lambda: forecaster.forecast(policy))


def _measured_steps(view: View) -> tuple[TimedStep, ...]:
    """Whole steps of other policies, each measured in turns with everything kept."""
    start = view.keep_all.run if view.keep_all else None
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
    return "time" if view.keep_all is None or view.keep_all.run.times is not None else "FLOPs"


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
    return runs().presets.get_or_make(key, make)


def _units_of(name: str, graph: ModelGraph) -> tuple[Unit, ...]:
    try:
        return preset(name, graph).units
    except InvalidPolicy:  # no block of this model is worth recomputing by itself
        return ()


def worth_recomputing(graph: ModelGraph) -> frozenset[str]:
    """The blocks that a preset would choose from; counted once for a model."""
    return runs().worth_recomputing.get_or_make(
        graph.fingerprint, lambda: frozenset(fqn for unit in counted_units(graph) for fqn in unit)
    )


def block_prices(start: KeyedRun | None, graph: ModelGraph, fqns: Iterable[str]) -> dict[str, Price]:
    """Prices of toggling those blocks of `fqns` on a measured run that save something, by fqn.

    Prices of all blocks of a large model take seconds: a click would wait for them.
    """
    if start is None:
        return {}
    priced, costs = runs().prices.get_or_make(start.key, dict), start.run.by_fqn
    saving = [fqn for fqn in fqns if fqn in costs and costs[fqn].saved_after_forward_bytes]
    if missing := [fqn for fqn in saving if fqn not in priced]:
        by_fqn = {price.blocks[0]: price for price in prices(start.run, missing, graph=graph)}
        priced.update((fqn, by_fqn.get(fqn)) for fqn in missing)
    return {fqn: price for fqn in saving if (price := priced[fqn]) is not None}


def price_tag(price: Price) -> str:
    """Effect of a toggle in a few words: `peak −12 MiB for +1 % FLOPs`."""
    moved = price.peak_change_bytes
    peak = "peak stays" if not moved else f"peak {MINUS if moved < 0 else '+'}{mib(abs(moved))}"
    share = price.share_of_step_flops
    return peak if not share or share < 0.0005 else f"{peak} for {percent(share, signed=True)} FLOPs"
