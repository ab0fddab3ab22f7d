"""A pipelined step by any engine, compared with the unsplit model. The page and the command line call this module."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from explorer.engine.bench.memory import memory_limit
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import failure_in_step
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.pipeline.cut.build import Pipeline, build, row_texts
from explorer.engine.pipeline.play.block_calls import CallCount
from explorer.engine.pipeline.play.inproc import Mail, run_pass
from explorer.engine.pipeline.play.procs import RanksEnded, first_failure, results_folder, run_ranks
from explorer.engine.pipeline.play.rank_files import report_files, tensor_file
from explorer.engine.pipeline.play.torch_adapter import cause_of
from explorer.engine.pipeline.three_way import buffer_shares, gradient_shares, references
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import Cancelled, InvalidPlan, NotOnThisDevice
from explorer.plan.export.torchrun import SPEC_FILE, run_key
from explorer.plan.pipeline.clock import as_read, simulate
from explorer.plan.pipeline.notes import notes
from explorer.plan.pipeline.stage_costs import predict, state_bytes
from explorer.record.base import from_msgpack
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_run import ActionTime, BlockCalls, PipelineRun, PlayedSchedule, RankMemory, RankReport
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import PipelineEngine, RunSpec

MOST_REPEATS = 3
"""Most timed passes, whatever RunSpec.n_repeats: each pass is a whole step of every rank."""


def run_pipeline(
    spec: RunSpec,
    engine: PipelineEngine = "inproc",
    report: Report = silent,
    *,
    loaded: Loaded | None = None,
    profile: PipelineProfile | None = None,
) -> PipelineRun:
    """A step of `spec` under its plan, with gradients and buffers compared with three unsplit runs.

    `loaded` saves a second build of the model (except for `procs`, whose ranks build the model). `profile` adds the
    prediction. An error of the model, the end of a rank and a lack of memory are results (`failure`).
    Raises InvalidPlan and the errors of load and prepare.
    """
    if engine == "torchrun":
        raise InvalidPlan(
            "torchrun starts ranks from a shell, not from here.", hint="Write the run script and open its results."
        )
    with preserve_global_state():
        report(Progress(what="building the stages", done=0, total=6))
        loaded = loaded or load_for(spec)
        pipeline = build(spec, loaded)
        result = _Result(pipeline, engine, profile)
        try:
            if engine == "procs":
                result.by_processes(report)
            else:
                with memory_limit(device_of(pipeline.trainee.device), pipeline.trainee):
                    result.in_one_process(report)
            result.compare(loaded, report)
        except (Cancelled, InvalidPlan, NotOnThisDevice):
            raise
        except Exception as error:
            result.fail(error)
        return result.run()


def open_results(spec: RunSpec, folder: Path, report: Report = silent) -> PipelineRun:
    """The run of `spec` from the results of torchrun's ranks in `folder`, compared with the unsplit model here. The
    early end of a rank is a result (`failure`). Raises InvalidPlan."""
    with preserve_global_state():
        loaded = load_for(spec)
        pipeline = build(spec, loaded)
        result = _Result(pipeline, "torchrun", None)
        reports = _reports_in(folder, spec)
        ended = first_failure(reports)
        if ended is not None:
            result.values |= {"failed_rank": ended[0], "failure": ended[1]}
        else:
            _check_complete(folder, reports, len(pipeline.rows))
            result.read(RanksEnded(reports), folder)
        result.compare(loaded, report)
        return result.run()


class _Result:
    """Collects the fields of a PipelineRun."""

    def __init__(self, pipeline: Pipeline, engine: PipelineEngine, profile: PipelineProfile | None) -> None:
        self.pipeline = pipeline
        self.engine: PipelineEngine = engine
        self.gradients: dict[str, Tensor | None] = {}
        self.buffers: dict[str, Tensor | None] = {}
        self.values: dict[str, object] = {}
        if profile is not None:
            self.values["predicted"] = predict(profile, pipeline.plan, pipeline.spec.policy)

    def in_one_process(self, report: Report) -> None:
        """Runs a warm-up, timed passes and a memory pass. `replay` runs the later passes by rank on recorded mail."""
        pipeline, replay = self.pipeline, self.engine == "replay"
        first = run_pass(pipeline, keep_mail=replay, report=report)
        every = range(len(pipeline.rows))
        turns: list[tuple[list[int], Mail] | None] = [([rank], first.mail) for rank in every] if replay else [None]
        readings: list[ActionTime] = []
        for repeat in range(min(MOST_REPEATS, max(1, pipeline.spec.n_repeats))):
            report(Progress(what="timed step", done=repeat, total=MOST_REPEATS))
            timed = [run_pass(pipeline, alone=alone) for alone in turns]
            readings += [time for trace in timed for time in trace.actions]
        self.gradients = pipeline.gradients()
        self.buffers = {name: b.detach().cpu().clone() for name, b in pipeline.trainee.model.named_buffers()}
        composed = compose(pipeline, readings)
        memory: list[RankMemory] = []
        report(Progress(what="step with memory recorded", done=3, total=6))
        for alone in turns:
            trace = run_pass(pipeline, alone=alone, memory=True)
            memory += trace.memory(pipeline, composed.actions, alone[0] if alone else every)
        losses = {i: loss for trace in timed for i, loss in trace.losses.items()}
        self.values |= {
            "actions": tuple(time for trace in timed for time in trace.actions),
            "memory": tuple(memory),
            "blocks": _merged(pipeline, [trace.calls for trace in timed]),
            "losses": tuple(losses[i] for i in sorted(losses)),
            "composed": with_memory(composed, tuple(memory)),
        }

    def fail(self, error: Exception) -> None:
        """Stores the failure of a run, with the rank and action that failed."""
        failure, action = failure_in_step(cause_of(error)), self.pipeline.under_way
        if action is not None:
            rank = self.pipeline.rank_of[action.stage]
            sentence = f"Rank {rank} failed in {action}: {failure.sentence}"
            self.values |= {"failure": msgspec.structs.replace(failure, sentence=sentence), "failed_rank": rank}
        else:
            self.values["failure"] = failure

    def by_processes(self, report: Report) -> None:
        """Runs one process per rank. Raises NotOnThisDevice if there are fewer GPUs than ranks."""
        n_ranks, n_devices = len(self.pipeline.rows), torch.cuda.device_count()
        if self.pipeline.spec.device == "cuda" and n_ranks > n_devices:
            raise NotOnThisDevice(
                f"{n_ranks} ranks need a GPU each; this machine has {n_devices}.",
                hint="Use the engine inproc or replay, which measure every rank on one GPU.",
            )
        with results_folder() as folder:
            ended = run_ranks(self.pipeline.spec, n_ranks, folder, report)
            if ended.failure is not None:
                self.values |= {"failure": ended.failure, "failed_rank": ended.failed_rank}
            else:
                self.read(ended, folder)

    def read(self, ended: RanksEnded, folder: Path) -> None:
        """Reads the ranks' results in `folder`."""
        reports = [ended.reports[rank] for rank in sorted(ended.reports)]
        partial: dict[tuple[str, int], Tensor | None] = {}
        for report in reports:
            tensors = torch.load(tensor_file(folder, report.rank), weights_only=True)
            partial |= tensors["gradients"]
            self.buffers |= tensors["buffers"]
        self.gradients = self.pipeline.summed(partial)
        actions = tuple(time for report in reports for time in report.actions)
        memory = tuple(report.memory for report in reports if report.memory is not None)
        self.values |= {
            "actions": tuple(sorted(actions, key=lambda time: time.start_ms)),
            "memory": memory,
            "blocks": tuple(sorted((b for report in reports for b in report.blocks), key=lambda block: block.stage)),
            "losses": next((report.losses for report in reports if report.losses), ()),
            "composed": with_memory(compose(self.pipeline, actions), memory),
            "wall": as_read(self.pipeline.rows, actions),
        }

    def compare(self, loaded: Loaded, report: Report) -> None:
        """Compares the run with the unsplit model, unless the run failed."""
        if "failure" in self.values:
            return
        runs = references(self.pipeline, loaded, report)
        buffers = {name: self.buffers.get(name) for name in runs[0].buffers}
        self.values |= {
            "gradients": gradient_shares(self.pipeline, loaded, runs, self.gradients),
            "buffers": buffer_shares(runs, buffers),
        }

    def _with_optimizer(self) -> None:
        """Adds to each rank's memory the state that the optimizer of the spec would keep on the rank."""
        pipeline, spec = self.pipeline, self.pipeline.spec
        trained = dict.fromkeys(range(len(pipeline.rows)), 0)
        for stage, module in enumerate(pipeline.modules):
            trained[pipeline.rank_of[stage]] += sum(p.nbytes for p in module.parameters() if p.requires_grad)
        self.values["memory"] = tuple(
            msgspec.structs.replace(one, optimizer_bytes=state_bytes(spec, trained[one.rank]))
            for one in self.values.get("memory", ())  # type: ignore[attr-defined]
        )

    def run(self) -> PipelineRun:
        pipeline = self.pipeline
        self._with_optimizer()
        run = PipelineRun(
            spec=pipeline.spec,
            engine=self.engine,
            environment=device_of(pipeline.trainee.device).environment(pipeline.spec.n_threads),
            rows=row_texts(pipeline),
            stages=pipeline.stages(),
            **self.values,  # type: ignore[arg-type]
        )
        return msgspec.structs.replace(run, notes=notes(run))


def compose(pipeline: Pipeline, readings: Sequence[ActionTime]) -> PlayedSchedule:
    """The schedule simulated from measured durations, one machine per rank. Several readings give their median."""
    by_name: dict[str, list[ActionTime]] = {}
    for time in readings:
        by_name.setdefault(time.name, []).append(time)
    taken = {name: statistics.median(time.duration_ms for time in times) for name, times in by_name.items()}
    again = {name: statistics.median(time.recompute_ms for time in times) for name, times in by_name.items()}
    return simulate(
        pipeline.rows,
        lambda action: taken[str(action)],
        recompute=lambda action: again[str(action)],
        origin="measured",
    )


def with_memory(forecast: PlayedSchedule, memory: tuple[RankMemory, ...]) -> PlayedSchedule:
    return msgspec.structs.replace(forecast, memory=memory)


def _merged(pipeline: Pipeline, counts: list[CallCount]) -> tuple[BlockCalls, ...]:
    whole = CallCount()
    for count in counts:
        whole.forward.update(count.forward)
        whole.recompute.update(count.recompute)
    return whole.blocks(pipeline)


def _reports_in(folder: Path, spec: RunSpec) -> dict[int, RankReport]:
    """The reports of the ranks in `folder`. Raises InvalidPlan if a rank ran another spec."""
    reports = {}
    for path in report_files(folder):
        report = from_msgpack(path.read_bytes(), RankReport)
        reports[report.rank] = report
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
