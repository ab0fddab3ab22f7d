"""What is foretold against what is measured: random policies, and policies chosen to fit budgets of this GPU."""

from __future__ import annotations

import random
import statistics

from explorer.engine.model.describe import describe
from explorer.plan.forecast.forecast import Forecaster
from explorer.record import Policy
from tests.gpu.kit import SAMPLES, Bench

GOAL_MEDIAN, GOAL_MOST = 0.001, 0.02


def check_random_policies(bench: Bench) -> None:
    errors = []
    for sample in SAMPLES:
        spec = bench.spec(sample)
        graph = describe(spec.model, device=bench.device)
        kept = bench.measured(spec)
        forecaster, chance = Forecaster(kept, graph), random.Random(sample)
        own = []
        for _ in range(2 if bench.tiny else 20):
            policy = Policy.recompute([fqn for fqn in graph.repeats if chance.random() < 0.5])
            said = forecaster.forecast(policy).step_peak_bytes
            peak = bench.measured(spec, policy).step_peak_bytes
            if said is not None and peak:
                own.append(abs(said - peak) / peak)
        errors += own
        bench.figure(f"{sample} median", 100 * statistics.median(own) if own else None, "%")
        bench.figure(f"{sample} most", 100 * max(own) if own else None, "%")
    bench.figure("all, median", 100 * statistics.median(errors), "%")
    if bench.device == "cuda":
        bench.expect(statistics.median(errors) <= GOAL_MEDIAN, "the median is above 0.1 %")
        bench.expect(max(errors) <= GOAL_MOST, "the largest is above 2 %")


def check_policies_under_budgets(bench: Bench) -> None:
    for sample in ("gpt", "resnet", "unet"):
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
