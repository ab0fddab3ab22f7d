"""Requests of the pipeline, the functions that answer them in a job's process, and the run that the store keeps."""

from __future__ import annotations

from pathlib import Path

from explorer.child_process import forks
from explorer.jobs.rows import RequestRow
from explorer.pipeline.record.step import CapWish, JointPlan, PipelineProfile, PipelineRun
from explorer.record.base import Record
from explorer.record.graph import ModelGraph
from explorer.record.plan import Report
from explorer.record.run import RunSpec


class RunPipeline(Record, tag=True):
    """-> PipelineRun: one step of `spec` under its plan, compared with the unsplit model."""

    spec: RunSpec
    profile: PipelineProfile | None = None
    """Adds the prediction to the run."""


class OpenRanks(Record, tag=True):
    """-> PipelineRun: the results of torchrun's ranks in `folder`, compared with the unsplit model."""

    spec: RunSpec
    folder: str


class ProfileStages(Record, tag=True):
    """-> PipelineProfile: the cost of each of `groups` (plan.cuts.atoms), for predicting any plan."""

    spec: RunSpec
    groups: tuple[tuple[str, ...], ...]
    n_microbatches: int = 8
    """Costs are read on a microbatch of this share of the batch, and scaled from there."""


class FindJointPlan(Record, tag=True):
    """-> JointPlan: cuts, microbatches and policy of a priced pipeline together."""

    profile: PipelineProfile
    graph: ModelGraph
    wish: CapWish


ROWS = {
    RunPipeline: RequestRow(
        "run_pipeline", PipelineRun, ("pipeline",), "Running the pipelined step and the unsplit ones", module=__name__
    ),
    OpenRanks: RequestRow("open_ranks", PipelineRun, (), module=__name__),
    ProfileStages: RequestRow(
        "profile_stages", PipelineProfile, ("pipeline",), "Measuring what each block costs", module=__name__
    ),
    FindJointPlan: RequestRow(
        "find_joint_plan", JointPlan, ("pipeline",), "Planning within the limit", __name__, needs=forks.WARM[:1]
    ),
}
KINDS = {"pipeline run": PipelineRun}
"""Kinds of record that the store keeps. The page of the slice shows them."""
WARM = ("explorer.pipeline.engine.run", "explorer.pipeline.engine.profile")
"""Modules that the server of jobs imports while it is idle."""


def run_pipeline(request: RunPipeline, report: Report) -> Record:
    from explorer.pipeline.engine import run

    return run.run_pipeline(request.spec, report, profile=request.profile)


def open_ranks(request: OpenRanks, report: Report) -> Record:
    from explorer.pipeline.engine.run import open_results

    return open_results(request.spec, Path(request.folder), report)


def profile_stages(request: ProfileStages, report: Report) -> Record:
    from explorer.pipeline.engine.profile import profile_blocks

    return profile_blocks(request.spec, request.groups, report, n_microbatches=request.n_microbatches)


def find_joint_plan(request: FindJointPlan, report: Report) -> Record:
    from explorer.pipeline.plan.joint import joint_plan

    return joint_plan(request.profile, request.graph, request.wish, report)
