"""Random policies that the forecaster and a page must forecast alike: peak, curve, saved bytes, cost and freed bytes.

`faults` runs both sides and names every difference; the test takes a few policies of each kind, the benchmark all.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from explorer.plan.catalogue import RecordedSample, catalogue, recorded_sample
from explorer.plan.names import products_kept
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.tables import step_tables
from explorer.record import Measurement, ModelGraph, ModelRef, Policy
from explorer.record.base import column, to_json, to_plain
from tests.engine.bench.random_policies import random_policy

if TYPE_CHECKING:
    from playwright.sync_api import Page

KINDS = ("flat", "nested", "segments", "segments inside", "products kept")
MODELS = tuple(sample.name for sample in catalogue())
SCRIPT = Path(__file__).resolve().parents[2] / "explorer" / "view" / "report" / "replay.js"
ANSWER = """policy => {
    const { line, freed, ...rest } = forecast(step, policy)
    return { ...rest, freed: Object.fromEntries(freed), line: line?.join() ?? '' }
}"""


@cache
def bundled(name: str) -> RecordedSample:
    sample = next(sample for sample in catalogue() if sample.name == name)
    recorded = recorded_sample(ModelRef(target=sample.target, size=next(iter(sample.sizes))))
    assert recorded is not None and recorded.run.graph is not None
    return recorded


def run_of(name: str, *, observed: bool = True) -> tuple[Measurement, ModelGraph]:
    """The recorded step; not `observed`: without the moments at which forward lets go, as in runs of other sources, and
    as if every block were given its tensors in a tuple."""
    run = bundled(name).run
    assert run.allocations is not None and run.graph is not None
    packed = [replace(block, inputs_in_containers=(True,) * len(block.inputs_saved_in)) for block in run.graph.blocks]
    graph = run.graph if observed else replace(run.graph, blocks=tuple(packed))
    log = run.allocations if observed else replace(run.allocations, released=column())
    return replace(run, allocations=log, graph=graph), graph


def policies(name: str, kind: str, n: int) -> tuple[Policy, ...]:
    """`n` different policies, or fewer where a model has fewer of this kind: seeded by model and kind."""
    (run, graph), draw = run_of(name), random.Random(f"{name} {kind}")
    drawn: dict[Policy, None] = {}
    for _ in range(4 * n):
        policy = random_policy("flat" if kind == "products kept" else kind.removesuffix(" inside"), graph, run, draw)
        if kind == "segments inside":
            inner = {fqn for unit in policy.units for fqn in unit.blocks}
            outer = random_policy("nested", graph, run, draw).units
            policy = Policy(units=(*policy.units, *(unit for unit in outer if unit.blocks[0] not in inner)))
        if kind == "products kept":
            policy = Policy(units=tuple(products_kept(unit.blocks, graph) for unit in policy.units))
        drawn[policy] = None
        if len(drawn) == n:
            break
    return tuple(drawn)


def open_step(page: Page, name: str, *, observed: bool = True) -> Forecaster:
    """Loads replay.js and the tables of a sample model into a blank page; returns the other side."""
    run, graph = run_of(name, observed=observed)
    products = (products_kept((block.fqn,), graph) for block in graph.blocks if block.fqn and block.n_calls)
    page.goto("about:blank")
    page.add_script_tag(content=SCRIPT.read_text())
    tables = to_json(step_tables(run, graph, products)).decode()
    page.evaluate("text => { globalThis.step = openStep(JSON.parse(text)) }", tables)
    return Forecaster(run, graph)


def faults(page: Page, forecaster: Forecaster, policy: Policy) -> list[str]:
    """Figures of `policy` on which both sides differ; the two ratios of time may differ in their last digits."""
    answer: dict[str, Any] = page.evaluate(ANSWER, [to_plain(unit) for unit in policy.units])
    expected, line = forecaster.forecast(policy), forecaster.line(policy)
    pairs = {
        "peak": (answer["peak"], expected.step_peak_bytes),
        "saved": (answer["saved"], expected.saved_after_forward_bytes),
        "FLOPs": (answer["flopRatio"], expected.flop_ratio),
        "time": (_rounded(answer["timeRatio"]), _rounded(expected.time_ratio)),
        "freed": (answer["freed"], dict(expected.freed_bytes)),
        "line": (answer["line"], "" if line is None else ",".join(map(str, line.tolist()))),
    }
    return [
        f"{name}: {there!s:.200} for {here!s:.200} of {policy}"
        for name, (there, here) in pairs.items()
        if there != here
    ]


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 9)
