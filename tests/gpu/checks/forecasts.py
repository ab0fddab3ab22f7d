"""What is foretold against what is measured: random policies, step times, and plans under budgets of this GPU."""

from __future__ import annotations

import itertools
import random
import statistics

from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Policy
from tests.gpu.kit import Bench, Skipped

GOAL_MEDIAN, GOAL_MOST = 0.001, 0.02


def check_random_policies(bench: Bench) -> None:
    errors = []
    for sample in bench.samples():
        spec = bench.spec(sample)
        graph = describe(spec.model, device=bench.device)
        kept = bench.measured(spec)
        forecaster, chance = Forecaster(kept, graph), random.Random(sample)
        own = []
        for _ in range(1 if bench.tiny else 20):
            policy = Policy.recompute([fqn for fqn in graph.repeats if chance.random() < 0.5])
            foretold = forecaster.forecast(policy).step_peak_bytes
            peak = bench.measured(spec, policy).step_peak_bytes
            if foretold is not None and peak:
                own.append(abs(foretold - peak) / peak)
        errors += own
        bench.figure(f"{sample} median", 100 * statistics.median(own) if own else None, "%")
        bench.figure(f"{sample} most", 100 * max(own) if own else None, "%")
    bench.figure("all, median", 100 * statistics.median(errors), "%")
    if bench.device == "cuda":
        bench.expect(statistics.median(errors) <= GOAL_MEDIAN, "the median is above 0.1 %")
        bench.expect(max(errors) <= GOAL_MOST, "the largest is above 2 %")


def check_time_ratios(bench: Bench) -> None:
    """Baseline and policy take turns, so that a GPU that grows warm slows both."""
    bench.needs_clock()
    errors = []
    for sample, name in bench.few(itertools.product(("gpt", "resnet", "unet", "vit"), ("all", "keep-products"))):
        spec = bench.spec(sample, "gpu", n_repeats=1 if bench.tiny else 10)
        graph = describe(spec.model, device=bench.device)
        policy = preset(name, graph)
        foretold, seen = [], []
        for _ in range(1 if bench.tiny else 3):
            kept, again = bench.measured(spec), bench.measured(spec, policy)
            if (ratio := Forecaster(kept, graph).forecast(policy).time_ratio) is not None:
                foretold.append(ratio)
            seen.append((again.times.step.median_ms or 0) / (kept.times.step.median_ms or 1))
        bench.expect(bool(foretold), f"{sample}, {name}: no time was foretold")
        if foretold:
            errors.append(abs(statistics.median(foretold) / statistics.median(seen) - 1))
            bench.figure(f"{sample}, {name}: foretold", statistics.median(foretold), "of the step")
            bench.figure(f"{sample}, {name}: measured", statistics.median(seen), "of the step")
    bench.figure("most it was off", 100 * max(errors, default=0.0), "%")


def check_plans_under_budgets(bench: Bench) -> None:
    try:
        import highspy  # noqa: F401
    except ImportError:
        raise Skipped("needs highspy, the solver of plans") from None
    from explorer.plan.planners.planner import Planner

    for sample in bench.samples("gpt", "resnet", "unet", "moe"):
        spec = bench.spec(sample, "gpu")
        planner = Planner(bench.measured(spec), describe(spec.model, device=bench.device))
        for share in (0.9, 0.6, 0.4):
            budget = int(share * planner.keep_all_bytes)
            if planner.floor().step_peak_bytes > budget:
                bench.figure(f"{sample} in {budget / 2**30:.3f} GiB", "below what can be reached")
                continue
            plan = planner.within(budget)
            peak = bench.measured(spec, plan.policy).step_peak_bytes or 0
            bench.figure(f"{sample} in {budget / 2**30:.3f} GiB", peak / 2**30, "GiB")
            off = abs(peak - plan.step_peak_bytes) / plan.step_peak_bytes
            bench.expect(off <= GOAL_MOST, f"{sample} at {share:.0%}: foretold {plan.step_peak_bytes}, measured {peak}")


def check_policies_under_budgets(bench: Bench) -> None:
    for sample in bench.samples("gpt", "resnet", "unet"):
        spec = bench.spec(sample, "gpu")
        graph = describe(spec.model, device=bench.device)
        kept = bench.measured(spec)
        forecaster, most = Forecaster(kept, graph), kept.step_peak_bytes or 0
        for share in (0.9, 0.75, 0.6):
            for n in range(len(graph.repeats) + 1):
                policy = Policy.recompute(graph.repeats[:n])
                if (forecaster.forecast(policy).step_peak_bytes or 0) <= share * most:
                    peak = bench.measured(spec, policy).step_peak_bytes or 0
                    bench.figure(f"{sample} in {share * most / 2**30:.3f} GiB", peak / 2**30, "GiB")
                    bench.expect(peak <= share * most * (1 + GOAL_MOST), f"{sample}: {n} blocks do not fit")
                    break
            else:
                bench.figure(f"{sample} in {share * most / 2**30:.3f} GiB", "no such policy")
