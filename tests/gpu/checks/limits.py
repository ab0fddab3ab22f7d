"""Out of memory as a result: refused with everything kept, done under a policy, and nothing left behind."""

from __future__ import annotations

import gc

import msgspec
import torch

from explorer.engine.bench.measure import measure
from explorer.engine.device.device import device_of
from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from tests.gpu.kit import Bench

LT_WORKSPACE = 2**20
"""torch 2.11 keeps a workspace of cuBLASLt for each handle, and a run after a refusal may meet one more handle."""


def check_refused_kept_and_done_recomputed(bench: Bench) -> None:
    bench.needs_cuda()
    spec = bench.spec("gpt", "gpu")
    policy = preset("all", describe(spec.model, device=bench.device))
    kept, again = bench.measured(spec), bench.measured(spec, policy)
    reserved = [run.peaks.steady_reserved_peak_bytes or 0 for run in (kept, again)]
    limited = msgspec.structs.replace(spec, memory_limit_bytes=(reserved[0] + reserved[1]) // 2)
    refused = measure(limited)
    bench.expect(refused.failure is not None and refused.failure.kind == "out of memory", "nothing was refused")
    if refused.failure is not None:
        bench.figure("asked", refused.failure.asked_bytes, "bytes")
        bench.figure("free", refused.failure.free_bytes, "bytes")
    fits = measure(msgspec.structs.replace(limited, policy=policy))
    bench.expect(fits.failure is None, f"recomputed: {fits.failure.sentence if fits.failure else ''}")
    device_of(bench.torch).release()
    left = torch.cuda.memory_allocated()
    bench.figure("left behind", left, "bytes")
    bench.expect(left < 128 * 2**20, f"{left} bytes are still allocated")
    moved = (bench.measured(spec).step_peak_bytes or 0) - (kept.step_peak_bytes or 0)
    bench.figure("the next run's peak lies higher by", moved, "bytes")
    bench.expect(moved in (0, LT_WORKSPACE), f"the next run peaks {moved} bytes elsewhere")


def check_real_refusal(bench: Bench) -> None:
    """All of the GPU taken but half of what the step needs."""
    bench.needs_cuda()
    spec = bench.spec("gpt", "gpu")
    need = bench.measured(spec).peaks.steady_reserved_peak_bytes or 0
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    ballast = torch.empty(max(0, free - need // 2), dtype=torch.uint8, device=bench.torch)
    refused = measure(spec)
    bench.expect(refused.failure is not None and refused.failure.kind == "out of memory", "nothing was refused")
    graph = describe(spec.model, device=bench.device)
    bench.figure("the graph says", graph.note or "nothing: it fits")
    del ballast
    torch.cuda.empty_cache()
    bench.expect(measure(spec).failure is None, "the run after the refusal failed")


def check_a_limit_does_not_slow_the_step(bench: Bench) -> None:
    bench.needs_clock()
    spec = bench.spec("gpt", "gpu", n_repeats=1 if bench.tiny else 5)
    free = bench.measured(spec)
    room = 2 * (free.peaks.steady_reserved_peak_bytes or 2**34)
    limited = bench.measured(msgspec.structs.replace(spec, memory_limit_bytes=room))
    bench.figure("limited over free", (limited.times.step.median_ms or 0) / (free.times.step.median_ms or 1))


def check_host_memory_of_a_comparison(bench: Bench) -> None:
    import resource

    bench.needs_values()  # without them a comparison ends after its measurements
    spec = bench.spec("gpt", "gpu")
    graph = describe(spec.model, device=bench.device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bench.compared(spec, preset("all", graph))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    bench.figure("resident memory", grown / graph.n_parameters, "bytes a parameter")
