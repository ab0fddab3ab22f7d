"""Hand-made plans, prices and runs of a pipeline: what a page or a picture needs, without running a model."""

from __future__ import annotations

import msgspec

from explorer.pipeline.plan.cuts import atoms, stages_by
from explorer.pipeline.plan.schedules import default_ranks, rows_of
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record import step
from explorer.record import BufferDiff, Environment, GradientDiff, ModelGraph, Policy, RunSpec
from explorer.record.run import PipelineEngine, PipelinePlan

MIB = 2**20
HOST = Environment(
    device="cpu", device_name="test", torch_version="2.13.0", python_version="3.11", platform="Linux", n_threads=1
)
KEPT = step.ActionCost(
    forward_ms=1.0, backward_ms=2.0, saved_bytes=4 * MIB, forward_extra_bytes=5 * MIB, backward_extra_bytes=MIB,
    first_backward_extra_bytes=2 * MIB,
)  # fmt: skip
AGAIN = msgspec.structs.replace(KEPT, backward_ms=3.0, recompute_ms=1.0, saved_bytes=MIB, backward_extra_bytes=4 * MIB)


def priced(graph: ModelGraph, spec: RunSpec) -> step.PipelineProfile:
    """Every block takes 1 ms forward and 2 ms backward, and holds 4 MiB between, 1 MiB when recomputed."""
    blocks = tuple(
        step.BlockCost(
            blocks=group, kept=KEPT, recomputed=AGAIN, parameter_bytes=MIB, gradient_bytes=MIB, output_bytes=MIB // 2
        )
        for group in atoms(graph)
    )
    return step.PipelineProfile(spec=spec, environment=HOST, n_rows=1, batch_rows=4, blocks=blocks)


def planned(graph: ModelGraph, n_stages: int = 2, *, n_microbatches: int = 4, schedule: str = "1F1B") -> PipelinePlan:
    """Stages of equal parameters."""
    return PipelinePlan(
        stages=stages_by("by-parameters", graph, n_stages),
        n_microbatches=n_microbatches,
        schedule=schedule,
        n_ranks=default_ranks(schedule, n_stages),
    )


def ran(graph: ModelGraph, spec: RunSpec, *, engine: PipelineEngine = "inproc", n_moved: int = 0) -> step.PipelineRun:
    """A run of `spec` that took exactly what was predicted; splitting moved `n_moved` gradients."""
    plan = spec.plan
    assert plan is not None, "a pipelined run needs a plan"
    predicted = predict(priced(graph, spec), plan, spec.policy)
    memory = tuple(msgspec.structs.replace(one, origin="measured") for one in predicted.memory)
    on = set(spec.policy.blocks)
    named = [(fqn, stage) for stage, blocks in enumerate(plan.stages) for fqn in blocks]
    calls = tuple(
        step.BlockCalls(
            fqn=fqn,
            stage=stage,
            n_forward=plan.n_microbatches,
            n_recompute=plan.n_microbatches * (fqn in on),
            n_microbatches=plan.n_microbatches,
        )
        for fqn, stage in named
    )
    return step.PipelineRun(
        spec=spec,
        engine=engine,
        environment=HOST,
        rows=tuple(tuple(map(str, row)) for row in rows_of(plan)),
        stages=tuple(
            step.Stage(stage=j, rank=j, blocks=blocks, parameter_bytes=MIB) for j, blocks in enumerate(plan.stages)
        ),
        actions=predicted.actions,
        memory=memory,
        blocks=calls,
        gradients=tuple(shares(f"{fqn}.weight", stage, moved=k < n_moved) for k, (fqn, stage) in enumerate(named)),
        buffers=(step.BufferShares(name="norm.mean", **dict.fromkeys(SHARES, buffer_diff())),),
        composed=msgspec.structs.replace(predicted, origin="measured", memory=memory),
        predicted=predicted,
        notes=("All ranks ran in one process, in turns.",),
    )


SHARES = ("microbatching", "recompute", "splitting")


def shares(name: str, stage: int, *, moved: bool) -> step.GradientShares:
    """Microbatching moved it by rounding; splitting only where `moved`."""
    return step.GradientShares(
        name=name,
        stages=(stage,),
        microbatching=gradient_diff(name, 1e-7),
        recompute=gradient_diff(name, 0.0),
        splitting=gradient_diff(name, 1e-3 if moved else 0.0),
    )


def gradient_diff(name: str, relative_norm: float) -> GradientDiff:
    return GradientDiff(
        name=name, shape=(4, 4), dtype="float32", presence="both", bitwise=not relative_norm, max_abs=relative_norm,
        relative_norm=relative_norm, baseline_error=1e-7, candidate_error=1e-7 + relative_norm, tiny=1e-8,
    )  # fmt: skip


def buffer_diff() -> BufferDiff:
    return BufferDiff(
        name="norm.mean", shape=(4,), dtype="float32", presence="both", bitwise=True, max_abs=0.0, relative_norm=0.0
    )


def of_report(graph: ModelGraph) -> step.PipelineRun:
    spec = RunSpec(model=graph.model, policy=Policy.recompute(["blocks.0", "blocks.2"]), plan=planned(graph))
    return ran(graph, spec, n_moved=2)
