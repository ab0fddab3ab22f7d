"""Predicted peak, cost and saved bytes of the drawn policy. A stored forecaster answers every toggle."""

from __future__ import annotations

from explorer.plan.memory.ledger import Bytes
from explorer.plan.policy.counted import counted_units
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.price import prices
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Price
from explorer.record.policy import Policy
from explorer.ui.session import backend
from explorer.view.drawing.units import MINUS, mib, percent


def _forecaster(baseline: Measurement | None, graph: ModelGraph | None, key: str | None) -> Forecaster | None:
    # A forecaster replays a step that kept everything; the graph says where recompute stops.
    if baseline is None or not baseline.complete or graph is None or key is None or baseline.spec.policy.units:
        return None
    forecaster: Forecaster | None = backend.records().get(f"forecaster {key}")
    if forecaster is None:
        forecaster = Forecaster(baseline, graph)
        backend.records().keep(f"forecaster {key}", forecaster)
    return forecaster


def foretold_line(
    baseline: Measurement | None, graph: ModelGraph | None, policy: Policy, *, key: str | None
) -> Bytes | None:
    """Predicted bytes of `policy` at every event of `baseline`; None without a forecaster or a recomputed unit."""
    forecaster = _forecaster(baseline, graph, key)
    return forecaster.line(policy) if forecaster is not None and policy.units else None


def forecast(baseline: Measurement | None, graph: ModelGraph | None, policy: Policy, *, key: str | None) -> Forecast:
    """`key` is the record that holds `baseline`: its forecaster is built once."""
    forecaster = _forecaster(baseline, graph, key)
    return forecaster.forecast(policy) if forecaster is not None else Forecast()


def worth_recomputing(graph: ModelGraph) -> frozenset[str]:
    """The blocks that a preset would choose from; counted once for a model."""
    blocks = backend.records().get(f"counted {graph.fingerprint}")
    if blocks is None:
        blocks = frozenset(fqn for unit in counted_units(graph) for fqn in unit)
        backend.records().keep(f"counted {graph.fingerprint}", blocks)
    return frozenset(blocks)


def price_tags(measured: Measurement | None, graph: ModelGraph, *, key: str) -> dict[str, str]:
    """Effect of toggling a block on `measured`, in a few words, by fqn."""
    return {fqn: _words(price) for fqn, price in _prices(measured, graph, key).items()}


def price_figures(measured: Measurement | None, graph: ModelGraph, *, key: str) -> dict[str, float]:
    """Prices as MiB of peak for one percent of the step's FLOPs, by fqn; blocks without a price are left out."""
    priced = _prices(measured, graph, key)
    return {fqn: price.mib_per_percent for fqn, price in priced.items() if price.mib_per_percent is not None}


def _prices(measured: Measurement | None, graph: ModelGraph, key: str) -> dict[str, Price]:
    if measured is None:
        return {}
    offered: dict[str, Price] | None = backend.records().get(f"prices {key}")
    if offered is None:
        every = prices(measured, graph=graph)
        offered = {price.blocks[0]: price for price in every if price.toggle == "recompute"}
        backend.records().keep(f"prices {key}", offered)
    return offered


def _words(price: Price) -> str:
    moved = price.peak_change_bytes
    peak = "peak stays" if not moved else f"peak {MINUS if moved < 0 else '+'}{mib(abs(moved))}"
    share = price.share_of_step_flops
    return peak if not share or share < 0.0005 else f"{peak} for {percent(share, signed=True)} FLOPs"
