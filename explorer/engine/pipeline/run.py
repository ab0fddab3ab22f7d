"""A pipelined step by any engine, compared with the unsplit model. The page and the command line call this module."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.bench.memory import memory_limit
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.pipeline.build import Pipeline, build
from explorer.engine.pipeline.in_process import run_pass
from explorer.engine.pipeline.processes import first_failure, run_ranks
from explorer.engine.pipeline.references import StepTensors, shares
from explorer.engine.pipeline.torch_adapter import cause_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import Cancelled, InvalidPlan, NotOnThisDevice
from explorer.plan.export.torchrun import SPEC_FILE, report_file, run_key, tensor_file
from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.clock import simulate
from explorer.plan.pipeline.measured import notes, schedule_of
from explorer.plan.pipeline.stage_costs import predict, state_bytes
from explorer.record.base import from_msgpack
from explorer.record.pipeline import ActionTime, PipelineProfile, PipelineRun, PlayedSchedule, RankReport
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import PipelineEngine, RunSpec

MOST_REPEATS = 3
"""Most timed passes, whatever RunSpec.n_repeats: each pass is a whole step of every rank."""


def run_pipeline(
    spec: RunSpec,
    engine: PipelineEngine = "inproc",
    report: Report = silent,
    *,
    profile: PipelineProfile | None = None,
) -> PipelineRun:
    """A step of `spec` under its plan, with gradients and buffers compared with three unsplit runs.

    `profile` adds the prediction. An error of the model, the end of a rank and a lack of memory are results
    (`failure`). Raises InvalidPlan and the errors of load and prepare.
    """
    if engine not in ("inproc", "procs"):
        raise InvalidPlan(
            f"The engine {engine} does not start from here.",
            hint="Use inproc or procs; for torchrun write the run script and open its results.",
        )
    with preserve_global_state():
        report(Progress(what="building the stages", done=0, total=6))
        loaded = load_for(spec)
        pipeline = build(spec, loaded)
        run = _before_the_step(pipeline, engine)
        if profile is not None:
            run = replace(run, predicted=predict(profile, pipeline.plan, spec.policy))
        try:
            if engine == "procs":
                run, tensors = _by_processes(run, pipeline, report)
            else:
                with memory_limit(device_of(pipeline.trainee.device), pipeline.trainee):
                    run, tensors = _in_one_process(run, pipeline, report)
            run = _compared(run, tensors, pipeline, loaded, report)
        except (Cancelled, InvalidPlan, NotOnThisDevice):
            raise
        except Exception as error:
            run = _failed(run, pipeline, error)
        return _after_the_step(run, pipeline)


def open_results(spec: RunSpec, folder: Path, report: Report = silent) -> PipelineRun:
    """The run of `spec` from the results of torchrun's ranks in `folder`, compared with the unsplit model here. The
    early end of a rank is a result (`failure`). Raises InvalidPlan."""
    with preserve_global_state():
        loaded = load_for(spec)
        pipeline = build(spec, loaded)
        run, tensors = _before_the_step(pipeline, "torchrun"), StepTensors({}, {})
        reports = _reports_in(folder, spec)
        failed = first_failure(reports)
        if failed is not None:
            run = replace(run, failed_rank=failed[0], failure=failed[1])
        else:
            _check_complete(folder, reports, len(pipeline.rows))
            run, tensors = _read(run, pipeline, reports, folder)
        return _after_the_step(_compared(run, tensors, pipeline, loaded, report), pipeline)


def _before_the_step(pipeline: Pipeline, engine: PipelineEngine) -> PipelineRun:
    return PipelineRun(
        spec=pipeline.spec,
        engine=engine,
        environment=device_of(pipeline.trainee.device).environment(pipeline.spec.n_threads),
        rows=format_rows(pipeline.rows),
        stages=pipeline.stages(),
    )


def _in_one_process(run: PipelineRun, pipeline: Pipeline, report: Report) -> tuple[PipelineRun, StepTensors]:
    """A warm-up, timed passes and a memory pass."""
    run_pass(pipeline, report=report)
    readings: list[ActionTime] = []
    for repeat in range(min(MOST_REPEATS, max(1, pipeline.spec.n_repeats))):
        report(Progress(what="timed step", done=repeat, total=MOST_REPEATS))
        timed = run_pass(pipeline)
        readings += timed.actions
    buffers = {name: b.detach().cpu().clone() for name, b in pipeline.trainee.model.named_buffers()}
    tensors = StepTensors(pipeline.gradients(), buffers)
    composed = compose(pipeline, readings)
    report(Progress(what="step with memory recorded", done=3, total=6))
    memory = run_pass(pipeline, memory=True).memory(composed.actions)
    run = replace(
        run,
        actions=timed.actions,
        memory=memory,
        blocks=timed.readings.calls.blocks(pipeline),
        losses=tuple(timed.losses[i] for i in sorted(timed.losses)),
        composed=replace(composed, memory=memory),
    )
    return run, tensors


def _by_processes(run: PipelineRun, pipeline: Pipeline, report: Report) -> tuple[PipelineRun, StepTensors]:
    """One process per rank. Raises NotOnThisDevice if there are fewer GPUs than ranks."""
    n_ranks, n_devices = len(pipeline.rows), torch.cuda.device_count()
    if pipeline.spec.device == "cuda" and n_ranks > n_devices:
        raise NotOnThisDevice(
            f"{n_ranks} ranks need a GPU each; this machine has {n_devices}.",
            hint="Use the engine inproc, which measures every rank on one GPU.",
        )
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        ended = run_ranks(pipeline.spec, n_ranks, Path(folder), report)
        if ended.failure is not None:
            return replace(run, failure=ended.failure, failed_rank=ended.failed_rank), StepTensors({}, {})
        return _read(run, pipeline, ended.reports, Path(folder))


def _read(
    run: PipelineRun, pipeline: Pipeline, reports: dict[int, RankReport], folder: Path
) -> tuple[PipelineRun, StepTensors]:
    """The results that the ranks left in `folder`."""
    in_order = [reports[rank] for rank in sorted(reports)]
    partial: dict[tuple[str, int], Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for report in in_order:
        tensors = torch.load(tensor_file(folder, report.rank), weights_only=True)
        partial |= tensors["gradients"]
        buffers |= tensors["buffers"]
    actions = tuple(time for report in in_order for time in report.actions)
    memory = tuple(report.memory for report in in_order if report.memory is not None)
    run = replace(
        run,
        actions=tuple(sorted(actions, key=lambda time: time.start_ms)),
        memory=memory,
        blocks=tuple(sorted((b for report in in_order for b in report.blocks), key=lambda block: block.stage)),
        losses=next((report.losses for report in in_order if report.losses), ()),
        composed=replace(compose(pipeline, actions), memory=memory),
        wall=schedule_of(pipeline.rows, actions),
    )
    return run, StepTensors(pipeline.summed(partial), buffers)


def _compared(
    run: PipelineRun, tensors: StepTensors, pipeline: Pipeline, loaded: Loaded, report: Report
) -> PipelineRun:
    """The run with its comparison to the unsplit model, unless the run failed."""
    if run.failure is not None:
        return run
    gradients, buffers = shares(pipeline, loaded, tensors, report)
    return replace(run, gradients=gradients, buffers=buffers)


def _failed(run: PipelineRun, pipeline: Pipeline, error: Exception) -> PipelineRun:
    """The run with its failure, and the rank and action that failed."""
    failure, action = failure_in_step(cause_of(error)), pipeline.under_way
    if action is None:
        return replace(run, failure=failure)
    rank = pipeline.rank_of[action.stage]
    failure = replace(failure, sentence=f"Rank {rank} failed in {action}: {failure.sentence}")
    return replace(run, failed_rank=rank, failure=failure)


def _after_the_step(run: PipelineRun, pipeline: Pipeline) -> PipelineRun:
    """The run with the state that the optimizer of the spec would keep on each rank, and its notes."""

    def state(rank: int) -> int:
        modules = [pipeline.modules[stage] for stage in pipeline.stages_of(rank)]
        trained = sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad)
        return state_bytes(pipeline.spec, trained)

    run = replace(run, memory=tuple(replace(memory, optimizer_bytes=state(memory.rank)) for memory in run.memory))
    return replace(run, notes=notes(run))


def compose(pipeline: Pipeline, readings: Sequence[ActionTime]) -> PlayedSchedule:
    """The schedule simulated from measured durations, one machine per rank. Several readings give their median."""
    by_name: defaultdict[str, list[ActionTime]] = defaultdict(list)
    for time in readings:
        by_name[time.name].append(time)
    return simulate(
        pipeline.rows,
        lambda action: statistics.median(time.duration_ms for time in by_name[str(action)]),
        recompute=lambda action: statistics.median(time.recompute_ms for time in by_name[str(action)]),
        origin="measured",
    )


def _reports_in(folder: Path, spec: RunSpec) -> dict[int, RankReport]:
    """The reports of the ranks in `folder`. Raises InvalidPlan if a rank ran another spec."""
    files = sorted(folder.glob(report_file(folder, "*").name))
    reports = {report.rank: report for report in (from_msgpack(file.read_bytes(), RankReport) for file in files)}
    strangers = [str(rank) for rank, report in sorted(reports.items()) if report.run_key not in ("", run_key(spec))]
    if strangers:
        raise InvalidPlan(
            f"The results of ranks {', '.join(strangers)} in {folder} are those of another run than its {SPEC_FILE}.",
            hint="Run the script again, or put back the files that they ran.",
        )
    return reports


def _check_complete(folder: Path, reports: dict[int, RankReport], n_ranks: int) -> None:
    missing = [str(rank) for rank in range(n_ranks) if rank not in reports or not tensor_file(folder, rank).exists()]
    if missing:
        raise InvalidPlan(
            f"{folder} lacks the results of ranks {', '.join(missing)}.",
            hint="Copy them from the machines they ran on.",
        )
