"""How far predicted step times lie from measured ones: every policy in turns with everything kept, on the samples.

python -m benchmarks.step_time [MODEL ...]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from explorer.engine.bench.bench import bench_of, warm_checkpoint
from explorer.engine.bench.measure import measure
from explorer.engine.bench.step import prepare, torch_device
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import without_page_faults
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import ExplorerError
from explorer.plan.names import is_within
from explorer.plan.planners.planner import Planner
from explorer.plan.policy.presets import preset
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.step_cost import TimedStep, calibrated, error_of_median
from explorer.record import KEEP_ALL, ModelGraph, ModelRef, Policy, RunSpec
from explorer.record.measurement import Samples, ratio_with_spread
from explorer.record.plan import Forecast

MODELS = ("gpt", "resnet", "unet", "vit", "mlp", "moe", "tied_lm", "recurrent")
N_ROUNDS = 7
SEEN = "all"
"""The whole step that calibrates the others."""
Offs = list[tuple[float, bool]]
"""By policy the error as a share, and whether the run lay within the interval."""


def main() -> None:
    alone: Offs = []
    calibrated_: Offs = []
    figures: dict[str, Any] = {}
    for name in sys.argv[1:] or MODELS:
        before, after = errors_of(name)
        figures[name] = {"from the baseline alone": told(before), "with one more whole step": told(after)}
        print(name, figures[name], file=sys.stderr, flush=True)
        alone += before
        calibrated_ += after
    figures["all"] = {"from the baseline alone": told(alone), "with one more whole step": told(calibrated_)}
    print(json.dumps(figures, indent=2))


def told(offs: Offs) -> str:
    errors = [off for off, _ in offs]
    if not errors:
        return "no policy"
    within = sum(inside for _, inside in offs)
    return (
        f"median {statistics.median(errors):.1%}, most {max(errors):.1%}, {within} of {len(offs)} within their interval"
    )


def errors_of(name: str) -> tuple[Offs, Offs]:
    model = ModelRef(target=f"sample_models/{name}.py", size="small")
    graph, run = describe(model), measure(RunSpec(model=model, n_repeats=N_ROUNDS))
    policies = policies_of(graph, Planner(run, graph, seconds=1.0))
    steps, forecaster = timed(model, policies), Forecaster(run, graph)
    forecasts = {key: forecaster.forecast(policy) for key, policy in policies.items() if policy.units}
    measured = {key: ratio_with_spread(steps[key], steps["keep"]) for key in forecasts}
    seen = []
    if SEEN in forecasts and (whole := measured[SEEN]) and (ratio := forecasts[SEEN].time_ratio):
        error, calls = error_of_median(whole[1], N_ROUNDS), forecasts[SEEN].time_ratio_of_calls or 0.0
        seen.append(TimedStep(predicted=ratio, measured=whole[0], error=error, calls=calls))
    before: Offs = []
    after: Offs = []
    for key, one in forecasts.items():
        real = measured[key]
        if real is not None and one.time_ratio is not None and key != SEEN:
            before.append(off(one, real[0]))
            after.append(off(calibrated(one, seen), real[0]))
    return before, after


def off(forecast: Forecast, real: float) -> tuple[float, bool]:
    ratio, spread = forecast.time_ratio or 0.0, forecast.time_ratio_spread or 0.0
    return abs(ratio / real - 1), abs(ratio - real) <= spread


def policies_of(graph: ModelGraph, planner: Planner) -> Mapping[str, Policy]:
    """Presets, plans, and modules at random, no two of which lie in each other."""
    policies = {"keep": KEEP_ALL}
    for name in (SEEN, "every-2", "sqrt", "keep-products"):
        policies[name] = preset(name, graph)
    for share in (0.8, 0.6):
        try:
            policies[f"plan {share:.0%}"] = planner.within(int(share * planner.keep_all_bytes)).policy
        except ExplorerError as error:
            print(error, file=sys.stderr)
    draw = random.Random(0)
    names = [one.unit.blocks[0] for one in planner.candidates.units]
    for i in range(3):
        taken: list[str] = []
        for fqn in draw.sample(names, len(names)):
            apart = not any(is_within(fqn, other) or is_within(other, fqn) for other in taken)
            if apart and draw.random() < 0.4:
                taken.append(fqn)
        policies[f"random {i}"] = Policy.recompute(sorted(taken))
    return policies


def timed(model: ModelRef, policies: Mapping[str, Policy]) -> dict[str, Samples]:
    spec = RunSpec(model=model)
    device = device_of(torch_device(spec))
    taken: dict[str, list[float]] = {key: [] for key in policies}
    draw = random.Random(0)
    with preserve_global_state(), without_page_faults():
        loaded = load_for(spec)
        warm_checkpoint(device.torch)
        trainee = prepare(spec, loaded)
        bench = bench_of(trainee, device)
        trainee.handle.undo()
        for round_ in range(-1, N_ROUNDS):
            for key in draw.sample(list(policies), len(policies)):
                with apply_policy(trainee.model, policies[key]):
                    if round_ < 0:
                        bench.take()
                    else:
                        taken[key].append(bench.time()["step"])
    return {key: Samples(ms=tuple(ms)) for key, ms in taken.items()}


if __name__ == "__main__":
    main()
