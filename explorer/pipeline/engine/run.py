"""A pipelined step, compared with the unsplit model. The page and the command line call this module.

Ranks take turns in this process. Real ranks are started by torchrun (torchrun_rank.py), and `open_results` reads the
reports that they leave.

The cause of a gradient difference shows in four runs from one state, each with one change:

    whole batch ──▶ microbatches ──▶ the same with the policy ──▶ the same in stages
              microbatching      recompute                    splitting

The first three runs use the unsplit model's forward without the tape, so that an error of splitting shows.
If a bit differs, the unsplit model in float64 decides between rounding (tied weights are summed in another order)
and an error.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.bench.memory import memory_limit
from explorer.engine.bench.step import autocast, host_of, prepare
from explorer.engine.compare.diffs import Tensors, Yardstick, difference, epsilon_of
from explorer.engine.compare.spec_program import formats_of
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.imaginary.seen import sees_imaginary_card
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.state.bits import same_bits
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.rng import seed_everything
from explorer.errors import Cancelled, InvalidPlan, NotOnThisDevice
from explorer.pipeline.engine.build import Pipeline, build, policy_of
from explorer.pipeline.engine.in_process import run_pass
from explorer.pipeline.engine.microbatches import KeyedRng, deferred_batch_norm, microbatches
from explorer.pipeline.engine.torch_adapter import cause_of
from explorer.pipeline.plan.actions import format_rows
from explorer.pipeline.plan.clock import notes, schedule_of, simulate
from explorer.pipeline.plan.export import SPEC_FILE, report_file, run_key, tensor_file
from explorer.pipeline.plan.schedules import splits_backward
from explorer.pipeline.plan.stage_costs import predict, state_bytes
from explorer.pipeline.record.step import (
    ActionTime,
    BufferShares,
    GradientShares,
    PipelineProfile,
    PipelineRun,
    PlayedSchedule,
    RankReport,
    Share,
)
from explorer.record.base import from_msgpack
from explorer.record.comparison import BufferDiff, GradientDiff
from explorer.record.failure import Failure
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelineEngine, RunSpec

FailedRank = tuple[int, Failure]
BETWEEN_RANKS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "TCPStore", "Broken pipe")
"""Words of an error that another rank's end caused."""
NO_VALUES = "The card is imaginary: no gradients were compared, and times are those of this machine."
MOST_REPEATS = 3
"""Most timed passes, whatever RunSpec.n_repeats: each pass is a whole step of every rank."""


class StepTensors(NamedTuple):
    """Gradients and buffers after a step, by full name, on the CPU."""

    gradients: Tensors
    buffers: Tensors


def run_pipeline(spec: RunSpec, report: Report = silent, *, profile: PipelineProfile | None = None) -> PipelineRun:
    """A step of `spec` under its plan, with gradients and buffers compared with three unsplit runs.

    `profile` adds the prediction. An error of the model and a lack of memory are results (`failure`).
    Raises InvalidPlan and the errors of load and prepare.
    """
    with preserve_global_state(), host_of(spec.policy):
        report(Progress(what="building the stages", done=0, total=6))
        loaded = load_for(spec)
        pipeline = build(spec, loaded)
        run = _before_the_step(pipeline, "inproc")
        if profile is not None and not splits_backward(pipeline.plan):
            run = replace(run, predicted=predict(profile, pipeline.plan, spec.policy))
        try:
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
        run, reports = _before_the_step(pipeline, "torchrun"), reports_in(folder)
        failed = first_failure(reports)
        _check_results(folder, reports, spec, 0 if failed else len(pipeline.rows))
        run, tensors = _read(run, pipeline, reports, folder, failed)
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


def reports_in(folder: Path) -> dict[int, RankReport]:
    """The reports that ranks left in `folder`, by rank."""
    files = folder.glob(report_file(folder, "*").name)
    reports = (from_msgpack(file.read_bytes(), RankReport) for file in files)
    return {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}


def first_failure(reports: dict[int, RankReport]) -> FailedRank | None:
    """The rank that ended early by an error no other rank caused, with its failure; None if no rank failed."""
    failures = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    if not failures:
        return None
    causes = [rank for rank, failure in failures.items() if not any(word in failure.sentence for word in BETWEEN_RANKS)]
    rank = (causes or list(failures))[0]
    failure, action = failures[rank], reports[rank].failed_action
    sentence = f"Rank {rank} failed{f' in {action}' if action else ''}: {failure.sentence}"
    return rank, replace(failure, sentence=sentence)


def _read(
    run: PipelineRun, pipeline: Pipeline, reports: dict[int, RankReport], folder: Path, failed: FailedRank | None
) -> tuple[PipelineRun, StepTensors]:
    """The results that the ranks left in `folder`, or the failure of one of them."""
    if failed is not None:
        return replace(run, failed_rank=failed[0], failure=failed[1]), StepTensors({}, {})
    in_order = reports.values()
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


def _compared(run: PipelineRun, split: StepTensors, pipeline: Pipeline, loaded: Loaded, report: Report) -> PipelineRun:
    """The run with its comparison to the unsplit model, unless the run failed or its card has no values.

    A record per parameter and per buffer, in the model's order. Errors of the unsplit model pass through.
    """
    if run.failure is not None or sees_imaginary_card(run.spec.device):
        return run
    whole, parted, recomputed = _references(pipeline, loaded, report)
    steps = [(whole, parted), (parted, recomputed), (recomputed, split)]
    gradient_steps = [(left.gradients, right.gradients) for left, right in steps]
    by_microbatching = _yardstick(pipeline, loaded, 1, gradient_steps[:1])
    by_the_rest = _yardstick(pipeline, loaded, pipeline.n_microbatches, gradient_steps[1:])
    yardsticks = (by_microbatching, by_the_rest, by_the_rest)
    gradients = []
    for name in whole.gradients:
        causes = _by_cause(GradientDiff, name, gradient_steps, yardsticks)
        stages = tuple(stage for stage, _ in pipeline.owners[name])
        gradients.append(GradientShares(name=name, stages=stages, **causes))
    buffer_steps = [(left.buffers, right.buffers) for left, right in steps]
    exact = (Yardstick(),) * 3
    buffers = tuple(
        BufferShares(name=name, **_by_cause(BufferDiff, name, buffer_steps, exact)) for name in whole.buffers
    )
    return replace(run, gradients=tuple(gradients), buffers=buffers)


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
    return replace(run, notes=(*notes(run), *[NO_VALUES] * sees_imaginary_card(run.spec.device)))


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


def _check_results(folder: Path, reports: dict[int, RankReport], spec: RunSpec, n_ranks: int) -> None:
    """Raises InvalidPlan if a rank ran another spec, or if one of the first `n_ranks` left no results."""
    strangers = [str(rank) for rank, report in sorted(reports.items()) if report.run_key not in ("", run_key(spec))]
    if strangers:
        raise InvalidPlan(
            f"The results of ranks {', '.join(strangers)} in {folder} are those of another run than its {SPEC_FILE}.",
            hint="Run the script again, or put back the files that they ran.",
        )
    missing = [str(rank) for rank in range(n_ranks) if rank not in reports or not tensor_file(folder, rank).exists()]
    if missing:
        raise InvalidPlan(
            f"{folder} lacks the results of ranks {', '.join(missing)}.",
            hint="Copy them from the machines they ran on.",
        )


def _by_cause(
    kind: type[Any], name: str, steps: list[tuple[Tensors, Tensors]], yardsticks: tuple[Yardstick, ...]
) -> dict[str, Any]:
    return {
        cause: difference(kind, name, left.get(name), right.get(name), yardstick)
        for cause, (left, right), yardstick in zip(get_args(Share), steps, yardsticks, strict=True)
    }


def _references(pipeline: Pipeline, loaded: Loaded, report: Report) -> tuple[StepTensors, StepTensors, StepTensors]:
    """The three unsplit runs."""
    n, policy = pipeline.n_microbatches, policy_of(pipeline.spec)

    def run(number: int, what: str, n_microbatches: int, policy: Policy) -> StepTensors:
        report(Progress(what=f"unsplit model: {what}", done=number, total=3))
        return run_unsplit(pipeline, loaded, n_microbatches, policy)

    whole = run(0, "whole batch", 1, KEEP_ALL)
    parted = run(1, "microbatches", n, KEEP_ALL)
    return whole, parted, parted if policy == KEEP_ALL else run(2, "microbatches with the policy", n, policy)


def run_unsplit(
    pipeline: Pipeline, loaded: Loaded, n_microbatches: int, policy: Policy, *, exact: bool = False
) -> StepTensors:
    """Gradients (means over microbatches) and buffers of the unsplit model. `exact` computes in float64."""
    spec = pipeline.spec
    if exact:
        spec = replace(spec, dtype="float64", autocast="none")
    trainee = prepare(replace(spec, policy=policy, plan=None, optimizer="none", n_accumulation=1), loaded)
    batches = microbatches(trainee, n_microbatches)
    rng = KeyedRng(spec.seed, pipeline.rng.chain, pipeline.plan.keyed_rng)
    model = trainee.model
    model.zero_grad(set_to_none=True)
    seed_everything(spec.seed)
    with (
        deferred_batch_norm(model, enabled=pipeline.plan.deferred_batch_norm),
        rng.seeding(model, range(n_microbatches)) as numbers,
    ):
        for i in numbers:
            with autocast(trainee):
                loss = trainee.loss_function(call(model, batches[i][0]), batches[i][1])
            loss.backward()
            del loss
    return StepTensors(
        {
            name: None if parameter.grad is None else parameter.grad.div_(n_microbatches).cpu()
            for name, parameter in model.named_parameters()
        },
        {name: buffer.detach().cpu() for name, buffer in model.named_buffers()},
    )


def _yardstick(
    pipeline: Pipeline, loaded: Loaded, n_microbatches: int, steps: list[tuple[Tensors, Tensors]]
) -> Yardstick:
    """Yardstick of the unsplit model's float64 gradients; without gradients if all `steps` agree or float64 fails."""
    epsilon = epsilon_of(steps[0][0], formats_of(pipeline.spec))
    if all(_same(left[name], right.get(name)) for left, right in steps for name in left):
        return Yardstick(epsilon=epsilon)
    try:
        exact = run_unsplit(pipeline, loaded, n_microbatches, KEEP_ALL, exact=True)
    except Exception:  # a type fixed in the model, a kernel without float64: no difference is then called rounding
        return Yardstick(epsilon=epsilon)
    return Yardstick(reference=exact.gradients, epsilon=epsilon)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return same_bits(left, right)
