"""How long plans take: CPU time of the planner alone, on measured steps and on a chain of equal blocks.

python -m benchmarks.planner
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import BadInput
from explorer.plan.planners.planner import Planner
from explorer.record import Block, Measurement, ModelGraph, ModelRef, RunSpec
from explorer.record.plan import Plan
from tests.view.builders import Chain, measured

SHARES = (0.9, 0.7, 0.5)
"""Of the peak with everything kept."""


def main() -> None:
    figures: dict[str, Any] = {}
    for name, arguments in (
        ("gpt, 12 blocks", {}),
        ("gpt, 48 blocks", {"n_layers": 48, "batch": 2}),
        ("unet", {}),
        ("moe", {}),
    ):
        model = ModelRef(target=f"sample_models/{name.partition(',')[0]}.py", size="small", arguments=dict(arguments))
        graph, run = describe(model), measure(RunSpec(model=model, n_repeats=3))
        figures |= plans(name, graph, run)
    figures |= plans("1,000 equal blocks", *line(1000))
    print(json.dumps(figures, indent=2))


def plans(name: str, graph: ModelGraph, run: Measurement) -> dict[str, Any]:
    planner, built = timed(lambda: Planner(run, graph))
    figures: dict[str, Any] = {f"{name}: program of {len(planner.candidates.units)} candidates (CPU s)": built}
    for share in SHARES:
        budget = int(share * planner.keep_all_bytes)
        plan, spent = timed(lambda budget=budget: attempt(planner, budget))
        outcome = "out of reach" if plan is None else f"gap {plan.certificate.gap:.2%}"
        figures[f"{name}: plan at {share:.0%} (CPU s), {outcome}"] = spent
    if name != "1,000 equal blocks":
        points, spent = timed(lambda: list(planner.front()))
        figures[f"{name}: front of {len(points)} plans (CPU s)"] = spent
    return figures


def attempt(planner: Planner, budget: int) -> Plan | None:
    try:
        return planner.within(budget)
    except BadInput as error:
        print(error)
        return None


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = work()
    return result, round(time.process_time() - start, 2)


def line(n_blocks: int) -> tuple[ModelGraph, Measurement]:
    """A chain of equal blocks, as a graph and as a measured step."""
    figures: dict[str, Any] = {
        "n_calls": 1, "parameter_bytes": 1, "buffer_bytes": 0, "output_bytes": 1, "saved_bytes": 1,
        "forward_flops": 100, "rerun_flops": 100,
    }  # fmt: skip
    names = [f"layers.{i}" for i in range(n_blocks)]
    blocks = [Block(fqn="", kind="M", **figures), Block(fqn="layers", kind="ModuleList", **{**figures, "n_calls": 0})]
    blocks += [
        Block(fqn=name, kind="B", repeat_of=None if i == 0 else names[0], **figures) for i, name in enumerate(names)
    ]
    graph = ModelGraph(model=ModelRef(target="benchmark"), blocks=tuple(blocks), edges=(), chain=tuple(names))
    return graph, measured(Chain(n_blocks=n_blocks, parameters=2**20))


if __name__ == "__main__":
    main()
