"""A trap of random routing: a rerun that sends tokens to other experts than forward did."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import (
    DISTANCE,
    Bench,
    Setting,
    Shown,
    attempt,
    baseline_row,
    compared_row,
    measured,
    number,
    percent,
    size_of,
    step_gradients,
)
from explorer.lab.kit.nets import BATCH, WIDTH, Router, block_names, blocks_of, chain
from explorer.record.lab import LabChart, LabRow, LabSeries
from explorer.record.policy import Policy

ROUTERS: dict[str, dict[str, Any]] = {
    "non-reentrant": {},
    "non-reentrant, check off": {"determinism_check": "none"},
    "reentrant": {"use_reentrant": True},
}
MOVED = "tokens sent to another expert"


def router_noise(setting: Setting, bench: Bench) -> Shown:
    """A noisy mixture of experts under each checkpoint: tokens that changed their expert, and the gradient."""
    make = partial(Router, 1.0 if setting["noise"] == "strong" else 0.05)
    preserve = setting["preserve_rng_state"] == "on"
    x = bench.normal(4 * BATCH, WIDTH)
    expected = step_gradients(chain(make, 2).to(bench.device), x.clone().requires_grad_())
    rows = [baseline_row("kept")]
    for done, (label, options) in enumerate(ROUTERS.items()):
        bench.tell(label, done, len(ROUTERS))
        model = chain(make, 2).to(bench.device)
        with apply_policy(model, Policy.recompute(block_names(model), preserve_rng_state=preserve, **options)):
            tried = attempt(partial(step_gradients, model, x.clone().requires_grad_()))
        rows.append(compared_row(label, expected, tried, measured(MOVED, _moved(model), "share")))
    chart = LabChart(
        kind="bars",
        title="How wrong is the gradient?",
        x_title="checkpoint",
        y_title=DISTANCE,
        x=tuple(row.label for row in rows[1:]),
        series=(LabSeries(name=DISTANCE, y=tuple(number(row, DISTANCE) for row in rows[1:]), part="candidate"),),
    )
    return Shown(tuple(rows), chart, tuple(_router_findings(rows[1:])))


def _moved(model: nn.Sequential) -> float | None:
    """Largest share of tokens that a rerun routed elsewhere; None: no block ran again."""
    again = [block.choices for block in blocks_of(model, Router) if len(block.choices) > 1]
    return max((float((first != second).double().mean()) for first, second, *_ in again), default=None)


def _router_findings(rows: list[LabRow]) -> list[str]:
    said = []
    for row in rows:
        moved = number(row, MOVED)
        share = "no block ran again" if moved is None else f"{percent(moved)} of a block's tokens changed their expert"
        if row.outcome == "raised":
            said.append(f"{row.label.capitalize()} refused; {share}.")
        else:
            off = size_of(row)
            said.append(f"{row.label.capitalize()}: {share}; gradients {row.outcome}, off by {off} of their size.")
    return said
