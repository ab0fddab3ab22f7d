"""The worker's tasks for the Pipeline page: read the model, price its blocks, plan below a cap, run the plan.

The request is the key of its result, so the figures of a plan return as soon as the plan is drawn again.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from explorer.jobs.client import Job
from explorer.jobs.protocol import Describe, FindJointPlan, ProfileStages, RunPipeline
from explorer.plan.pipeline.cuts import atoms
from explorer.record.pipeline import PipelineProfile, PipelineRun
from explorer.record.plan import JointPlan
from explorer.record.run import RunSpec
from explorer.ui.pipeline.split_panel import take_plan
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import page_job
from explorer.ui.session.repository import request_key, runs

REQUESTS = (Describe, ProfileStages, FindJointPlan, RunPipeline)


def prepare(split: PipelineState) -> None:
    """On the first visit, describes the model and prices its blocks without a press. One attempt each."""
    if split.job.id is not None or split.job.run_failed or split.draft.predict:
        return
    spec = split.draft.spec
    graph = runs().graph(spec)
    if graph is None:
        page_job.start(split.job, Describe(model=spec.model, seed=spec.seed, device=spec.device))
    elif profile_of(spec) is None:
        page_job.start(split.job, ProfileStages(spec=_unsplit(spec), groups=atoms(graph)))


def run(split: PipelineState, spec: RunSpec) -> None:
    """Starts the run that a person requests."""
    page_job.start(split.job, RunPipeline(spec=spec, engine=split.engine, profile=profile_of(spec)))


def take(split: PipelineState, job: Job) -> None:
    """The result of a finished job."""
    result = cast(Any, job.result)
    match job.request:
        case Describe(model=model, device=device):
            runs().add_graph(model, device, result)
        case ProfileStages(spec=spec):
            runs().profiles.add(request_key(_unsplit(spec)), result)
        case FindJointPlan() as request:
            assert isinstance(result, JointPlan), "what FindJointPlan gives"
            take_plan(split, request, result)
        case RunPipeline(spec=spec):
            key = job.run_id or job.id
            runs().add(key, result)
            split.shown = key
            if isinstance(result, PipelineRun) and result.failure is None:
                runs().pipeline_runs.add(request_key(spec), key)


def profile_of(spec: RunSpec) -> PipelineProfile | None:
    """Prices of the blocks of `spec`'s model, if measured lately."""
    return runs().profiles.get(request_key(_unsplit(spec)))


def shown(split: PipelineState, spec: RunSpec) -> PipelineRun | None:
    """The last run of exactly `spec`, else the last run of this page; None before the first."""
    last = _last(split)
    if last is None or last.spec != spec:
        split.shown = runs().pipeline_runs.get(request_key(spec)) or split.shown
        last = _last(split)
    return last if last is not None and last.spec.model == spec.model else None


def _last(split: PipelineState) -> PipelineRun | None:
    run = page_job.record(split.job, split.shown)
    if isinstance(run, PipelineRun):
        return run
    split.shown = None
    return None


def _unsplit(spec: RunSpec) -> RunSpec:
    """The specification without plan and recompute. A profile prices each block kept and recomputed, so one profile
    serves every plan and policy; units that save operators or offload stay in the specification."""
    special = tuple(unit for unit in spec.policy.units if unit.action != "recompute")
    return msgspec.structs.replace(spec, policy=msgspec.structs.replace(spec.policy, units=special), plan=None)
