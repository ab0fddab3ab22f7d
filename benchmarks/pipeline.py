"""Pipelines: what starting ranks costs, how near the prediction comes, and how quick it is.

start     4 CPU ranks from the warm fork server until all have joined          asked: <= 0.5 s
predict   one change of cut, schedule, microbatches or policy                  asked: <= 50 ms
makespan  predicted against rank replay, composed                              asked: within 10 %
memory    replay's peak by rank against real processes                         asked: within 1 % or 1 MiB
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from explorer.engine.describe import describe
from explorer.engine.pipeline.procs import run_ranks
from explorer.engine.pipeline.profile import profile_blocks
from explorer.engine.pipeline.run import run_pipeline
from explorer.plan.cuts import atoms, stages_by
from explorer.plan.presets import preset
from explorer.plan.stages import predict
from explorer.record.graph import ModelRef
from explorer.record.plan import PipelinePlan
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

MODEL = ModelRef(target="sample_models/gpt.py")
N_MICROBATCHES = 8


def main() -> None:
    torch.set_num_threads(1)
    graph = describe(MODEL)
    base = RunSpec(model=MODEL, optimizer="none")
    report_start(base)
    profile = profile_blocks(base, atoms(graph), n_microbatches=N_MICROBATCHES)
    for n_stages, schedule in ((4, "1F1B"), (4, "Interleaved1F1B")):
        stages = stages_by("by-time", graph, n_stages, profile=profile)
        plan = PipelinePlan(stages=stages, n_microbatches=N_MICROBATCHES, schedule=schedule)
        for name in ("keep-all", "all"):
            policy = preset(name, graph)
            begun = time.process_time()
            predict(profile, plan, policy)
            predict_ms = (time.process_time() - begun) * 1e3
            spec = msgspec.structs.replace(base, policy=policy, plan=plan)
            replay = run_pipeline(spec, "replay", profile=profile)
            real = run_pipeline(spec, "procs")
            if replay.composed is None or replay.predicted is None or real.failure is not None:
                raise SystemExit(f"{schedule} {name}: {replay.failure or real.failure}")
            ratio = replay.predicted.makespan_ms / replay.composed.makespan_ms
            off = [_share(a.peak_bytes, b.peak_bytes) for a, b in zip(replay.memory, real.memory)]
            guessed = [_share(a.peak_bytes, b.peak_bytes) for a, b in zip(replay.predicted.memory, real.memory)]
            print(
                f"{schedule:16s} {name:9s} predict {predict_ms:5.1f} ms   makespan predicted / replay {ratio:5.3f}   "
                f"peak off real ranks: replay {max(off):.3%}, predicted {max(guessed):.3%}"
            )


def report_start(base: RunSpec) -> None:
    """Median of five; the first one warms the fork server."""
    plan = PipelinePlan(stages=(("x",),) * 4, n_microbatches=4)
    spec = msgspec.structs.replace(base, policy=KEEP_ALL, plan=plan)
    seconds = []
    for _ in range(6):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(run_ranks(spec, 4, Path(folder), joined_only=True).started_s)
    print(f"start: 4 ranks joined in {statistics.median(seconds[1:]):.2f} s (first {seconds[0]:.1f} s)")


def _share(one: int | None, other: int | None) -> float:
    return abs((one or 0) - (other or 0)) / max(other or 0, 1)


if __name__ == "__main__":
    main()
