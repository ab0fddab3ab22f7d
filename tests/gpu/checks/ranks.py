"""A pipeline in real processes: one GPU a rank over NCCL where there are two, else a refusal in words."""

from __future__ import annotations

import msgspec
import torch

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import ExplorerError
from explorer.record import PipelinePlan
from tests.gpu.kit import Bench


def check_two_ranks(bench: Bench) -> None:
    bench.needs_cuda()
    spec = bench.spec("mlp")
    chain = describe(spec.model, device=bench.device).chain
    middle = len(chain) // 2
    plan = PipelinePlan(stages=(chain[:middle], chain[middle:]), n_microbatches=4, schedule="1F1B")
    spec = msgspec.structs.replace(spec, plan=plan)
    bench.figure("GPUs", torch.cuda.device_count())
    try:
        run = run_pipeline(spec, engine="procs")
    except ExplorerError as refused:
        bench.figure("said", str(refused)[:200])
        bench.expect(torch.cuda.device_count() < 2, f"two GPUs and a refusal: {refused}")
        return
    if run.failure is not None:
        bench.figure("said", run.failure.sentence[:200])
        bench.expect(torch.cuda.device_count() < 2, run.failure.sentence)
        return
    bench.figure("actions timed", len(run.actions))
    bench.expect(all(action.end_ms >= action.start_ms for action in run.actions), "an action ends before it begins")
    if run.wall is not None and run.composed is not None and run.composed.makespan_ms:
        longer = run.wall.makespan_ms / run.composed.makespan_ms
        bench.figure("step over the same actions with links that cost nothing", longer)  # near 1: NCCL is overlapped


def check_one_process(bench: Bench) -> None:
    spec = bench.spec("mlp")
    chain = describe(spec.model, device=bench.device).chain
    middle = len(chain) // 2
    plan = PipelinePlan(stages=(chain[:middle], chain[middle:]), n_microbatches=4, schedule="GPipe")
    run = run_pipeline(msgspec.structs.replace(spec, plan=plan))
    bench.expect(run.failure is None, run.failure.sentence if run.failure else "")
    bench.figure("actions timed", len(run.actions))
