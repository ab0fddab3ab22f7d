"""A worker that knows the answers: records in, the same records out, finished at once or when told."""

from __future__ import annotations

import itertools
from typing import Any

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.jobs.on_card import CardCount, CountOnCard
from explorer.jobs.protocol import Compare, Describe, DrawAutograd, FindFit, FindPlans, Measure, MeasureRanks
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.levers import RECOMPUTE, limit_of, played_step
from explorer.plan.planners.front import find_plans
from explorer.plan.why.worth import with_reasons
from explorer.record import Failure, Measurement, ModelGraph, Policy, RunSpec
from explorer.record.allocations import Collective
from explorer.record.base import to_json
from explorer.record.fit import Fit, Judgement, LeftOut, LeverRow
from explorer.record.graph import AutogradPicture, AutogradPictures
from explorer.record.measurement import RecordedRanks
from explorer.record.plan import Front, Progress, Wish, silent
from tests import graphs

COUNTED = 123_456_789, 234_567_890
UNSAFE = "Predicted: the step was played on tensors without data."
PLANS: dict[str, Front] = {}
WITH_GRAPH: dict[int, Measurement] = {}
"""Runs of `graphs.measured` with their graph, by the id of the run, which stays."""


def fit_of(run: Measurement, budget_bytes: int | None) -> Fit:
    """Two levers on `run`: recompute, bitwise, and SGD, another training."""
    as_is = played_step(run, limit_of(run, None, budget_bytes))
    specs = replace(run.spec, policy=Policy.recompute(graphs.ALL)), replace(run.spec, optimizer="sgd")
    steps = [replace(as_is, spec=spec, step_peak_bytes=as_is.step_peak_bytes // 2, fits=True) for spec in specs]
    rows = (
        LeverRow(levers=(RECOMPUTE,), step=steps[0], judgement=Judgement(effect="bitwise")),
        LeverRow(levers=("sgd",), step=steps[1], judgement=Judgement(effect="different", reason="Another optimizer.")),
    )
    left_out = (LeftOut(lever="optimizer with fused=True", reason="It saves nothing here."),)
    return Fit(as_is=as_is, budget_bytes=budget_bytes, rows=rows, left_out=left_out, judged_on=run.spec)


class FakeJob:
    def __init__(self, id: str, request: Any) -> None:
        self.id, self.request = id, request
        self.finished = False
        self.progress = Progress(what="step", done=2, total=5)
        self.part: Any = None
        self.result: Any = None
        self.failure: Failure | None = None
        self.run_id: str | None = None
        self.warning = ""
        self.elapsed_s = 1.0
        self.cancelled = False
        self.keep = True
        self.claimed = False
        self.n_news = 0

    def cancel(self) -> None:
        self.cancelled = True
        self.finish(failure=Failure(kind="cancelled", sentence="The run was cancelled."))

    def finish(self, result: Any = None, failure: Failure | None = None) -> None:
        self.result, self.failure, self.finished = result, failure, True

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.finished


class FakeWorker:
    """Answers from `graph`; with `slow` a comparison stays unfinished until the test finishes it."""

    def __init__(self, graph: ModelGraph, *, slow: bool = False, store: Any = None) -> None:
        self.graph, self.slow, self.store = graph, slow, store
        self.jobs: dict[str, FakeJob] = {}
        self.ids = itertools.count(1)
        self.slow_plans = False
        self.build_failure: Failure | None = None
        """Why there is no imaginary card; None: there is one."""
        self.fail_with: Failure | None = None
        self.warning = ""

    def submit(self, request: Any, *, keep: bool = True) -> FakeJob:
        job = FakeJob(f"job{next(self.ids)}", request)
        job.keep = keep
        self.jobs[job.id] = job
        if isinstance(request, Compare) and self.fail_with:
            job.finish(failure=self.fail_with)
        elif not (isinstance(request, Compare) and self.slow or isinstance(request, FindPlans) and self.slow_plans):
            self.answer(job)
        return job

    def answer(self, job: FakeJob) -> None:
        match job.request:
            case Describe(conditions=conditions):
                is_usual = conditions == self.graph.conditions
                job.finish(self.graph if is_usual else replace(self.graph, conditions=conditions))
            case Measure(spec=spec, without_data=True):
                job.finish(self.played(spec))
            case MeasureRanks(spec=spec):
                job.finish(self.on_ranks(spec))
            case Measure(spec=spec, with_graph=with_graph):
                run = graphs.measured(self.graph, spec)
                job.finish(WITH_GRAPH.setdefault(id(run), replace(run, graph=self.graph)) if with_graph else run)
            case Compare(candidate=spec):
                job.finish(graphs.compared(self.graph, spec))
            case DrawAutograd(block=block):
                picture = AutogradPicture(dot="digraph { a -> b }", n_nodes=2, n_saved_tensors=1, saved_bytes=1024)
                job.finish(AutogradPictures(block=block, kept=picture, recomputed=picture))
            case CountOnCard(spec=spec) if self.build_failure is not None:
                job.finish(failure=self.build_failure)
            case CountOnCard(spec=spec):
                job.finish(CardCount(spec=spec, figures=COUNTED))
            case FindFit(spec=spec, budget=int() | None as budget_bytes):
                job.finish(fit_of(graphs.measured(self.graph, spec), budget_bytes))
            case FindPlans(run=run, graph=graph, wish=wish):
                self.plan(job, (run, graph, wish))
        unkept = isinstance(job.request, Describe | DrawAutograd | FindFit | FindPlans | CountOnCard)
        job.warning = "" if unkept else self.warning
        if self.store is not None and job.keep and not job.warning and not unkept:
            job.run_id = self.store.save(job.result)

    def played(self, spec: RunSpec) -> Measurement:
        """A step without data."""
        step = graphs.measured(self.graph, spec)
        card = memory_on(spec.card, step) if spec.card is not None else None
        return replace(step, origin="predicted", times=None, warnings=(UNSAFE,), card=card)

    def on_ranks(self, spec: RunSpec) -> RecordedRanks:
        """The last rank has no shard; all others are equal and gather each parameter."""
        assert spec.ranks is not None
        n_ranks = spec.ranks.n_ranks
        full = replace(self.played(spec), n_ranks=n_ranks)
        gathers = tuple(
            Collective(
                kind="all-gather", n_bytes=graphs.MIB, n_ranks=n_ranks, block=f"blocks.{i}", phase="forward", tick=i
            )
            for i in range(6)
        )
        full = replace(full, rank=0, collectives=gathers)
        light = replace(self.played(replace(spec, policy=Policy.recompute(graphs.ALL))), rank=n_ranks - 1, spec=spec)
        equal = {rank: 0 for rank in range(1, n_ranks - 1)}
        return RecordedRanks(
            ranks=(full, replace(light, n_ranks=n_ranks)), n_ranks=n_ranks, recorded_in="", equal=equal
        )

    def plan(self, job: FakeJob, asked: tuple[Measurement, ModelGraph, Wish]) -> None:
        """What the real planner finds; the same question is answered once."""
        spec = asked[0].spec

        def play(policy: Policy) -> Measurement:
            return self.played(replace(spec, policy=policy))

        name = to_json((asked[0].spec, asked[1].fingerprint, asked[2])).decode()
        try:
            PLANS[name] = PLANS.get(name) or with_reasons(find_plans(*asked, silent, play), *asked[:2])
            job.finish(PLANS[name])
        except BadInput as error:
            job.finish(failure=Failure(kind="bad input", sentence=error.sentence, hint=error.hint))

    def open_jobs(self) -> tuple[FakeJob, ...]:
        return tuple(job for job in self.jobs.values() if not job.finished)

    def job(self, id: str) -> FakeJob | None:
        return self.jobs.get(id)

    def warm(self) -> None:
        pass

    def close(self) -> None:
        pass

    def of(self, kind: type) -> list[FakeJob]:
        return [job for job in self.jobs.values() if isinstance(job.request, kind)]
