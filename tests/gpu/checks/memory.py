"""Totals: the drawn peak is the allocator's own, to the byte, and nothing of the step is missing."""

from __future__ import annotations

from typing import Any

import msgspec

from explorer.engine.device import allocator
from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.record import ROLES
from tests.gpu.kit import Bench
from tests.graphs import alive_at

VARIANTS: tuple[dict[str, str], ...] = ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
POLICIES = ("keep-all", "all", "every-2")
STEPS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd"},
    "SGD with momentum": {"optimizer": "sgd", "momentum": 0.9},
    "two microbatches": {"n_accumulation": 2},
    "bf16 autocast": {"autocast": "bfloat16"},
    "part frozen": {"frozen": ("embedding",)},
    "evaluation": {"mode": "eval"},
}
"""What a step may be besides AdamW on a whole batch."""


def check_drawn_peak_is_the_allocators_own(bench: Bench) -> None:
    for sample in bench.samples():
        graph = describe(bench.model(sample), device=bench.device)
        for name in POLICIES:
            run = bench.measured(bench.spec(sample), preset(name, graph))
            own = run.peaks.requested_peak_bytes
            if bench.device == "cuda":
                bench.figure(f"{sample} {name}", (run.step_peak_bytes or 0) - (own or 0), "bytes from requested peak")
                bench.expect(own == run.step_peak_bytes, f"{sample} {name}: drawn {run.step_peak_bytes}, own {own}")
            bench.expect(not [w for w in run.warnings if "history was full" in w], f"{sample} {name}: events were lost")


def check_drawn_peak_of_other_steps(bench: Bench) -> None:
    for words, options in bench.few(STEPS.items()):
        run = bench.measured(bench.spec("gpt", **options))
        bench.figure(f"gpt, {words}", (run.step_peak_bytes or 0) / 2**20, "MiB")
        if bench.device == "cuda":
            own = run.peaks.requested_peak_bytes
            bench.expect(own == run.step_peak_bytes, f"gpt, {words}: drawn {run.step_peak_bytes}, own {own}")


def check_large_models(bench: Bench) -> None:
    for sample in bench.samples():
        spec = bench.spec(sample, "gpu")
        graph = describe(spec.model, device=bench.device)
        run = bench.measured(spec, preset("all", graph))
        own = run.peaks
        bench.figure(f"{sample} step peak", (run.step_peak_bytes or 0) / 2**30, "GiB")
        if bench.device == "cuda":
            bench.expect(own.requested_peak_bytes == run.step_peak_bytes, f"{sample}: own {own.requested_peak_bytes}")
            for name in ("requested", "allocated", "reserved", "steady_reserved"):
                value = getattr(own, f"{name}_peak_bytes")
                bench.figure(f"{sample} {name}", value and value / 2**30, "GiB")
            bench.expect(max(own.reserved or [0]) == own.reserved_peak_bytes, f"{sample}: the reserved curve is off")
            bench.expect(max(own.allocated or [0]) == own.allocated_peak_bytes, f"{sample}: the allocated curve is off")


def check_attribution(bench: Bench) -> None:
    for sample in bench.samples():
        run = bench.measured(bench.spec(sample))
        log = run.allocations
        nobody = sum(log.n_bytes[i] for i in alive_at(log, log.peak_tick) if ROLES[log.role[i]] == "unattributed")
        bench.figure(f"{sample} unattributed", 100 * nobody / max(1, run.step_peak_bytes or 1), "% of the peak")
        alone = run.peaks.alone_peak_bytes or 0
        bench.expect(abs(alone - (run.step_peak_bytes or 0)) <= 0.005 * alone, f"{sample}: alone it peaks at {alone}")
        bench.expect(bool(run.phases) and run.phases[0].phase == "forward", f"{sample}: no phases")


def check_recompute_is_seen_in_autograds_thread(bench: Bench) -> None:
    spec = bench.spec("gpt")
    policy = preset("all", describe(spec.model, device=bench.device))
    run = bench.measured(spec, policy)
    spans = {span.block for span in run.phases if span.phase == "recompute"}
    bench.figure("blocks with a recompute phase", len(spans), f"of {len(policy.blocks)}")
    bench.expect(spans == set(policy.blocks), f"recompute phases of {sorted(spans)}")
    bench.expect(all(run.by_fqn[fqn].n_recompute == 1 for fqn in policy.blocks), "a block did not run again once")


def check_a_full_history_is_said(bench: Bench) -> None:
    bench.needs_cuda()
    whole, allocator.MAX_ENTRIES = allocator.MAX_ENTRIES, 300
    try:
        run = bench.measured(bench.spec("gpt"))
    finally:
        allocator.MAX_ENTRIES = whole
    bench.expect(
        any("history was full" in sentence for sentence in run.warnings), "nothing was said of a history of 300"
    )


def check_a_long_history_loses_nothing(bench: Bench) -> None:
    spec = bench.spec("recurrent", n_accumulation=1 if bench.tiny else 8)
    run = bench.measured(msgspec.structs.replace(spec))
    bench.figure("events", run.allocations.n_ticks if run.allocations else 0)
    bench.expect(not [one for one in run.warnings if "history" in one or "drawn peak" in one], str(run.warnings))
