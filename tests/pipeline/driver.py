"""The Pipeline page with a worker that knows the answers, and short ways to use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from explorer.errors import ExplorerError
from explorer.jobs.protocol import Describe
from explorer.jobs.store import Store
from explorer.pipeline.jobs import FindJointPlan, ProfileStages, RunPipeline
from explorer.pipeline.plan.joint import joint_plan
from explorer.pipeline.record.step import JointPlan
from explorer.pipeline.ui import state as pipeline_state
from explorer.record import Failure, Policy, RunSpec
from explorer.ui.session import backend
from tests import graphs
from tests.pipeline import pipelines
from tests.ui.conftest import SAMPLES
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import at_address, graph_data, message, settle

SCRIPT = "from explorer.pipeline.ui import page as pipeline\npipeline.page()\n"
GRAPH = graphs.gpt(6)
CUT = ["blocks.0>blocks.1", "blocks.3>blocks.4"]
Open = Callable[..., AppTest]
settled = partial(settle, page="pipeline")


class PipelineWorker(FakeWorker):
    """Prices blocks and runs plans from hand-made records."""

    def __init__(self) -> None:
        super().__init__(GRAPH, store=Store())
        self.waits = False
        self.prices = True
        self.ended: tuple[Failure, int] | None = None

    def answer(self, job: FakeJob) -> None:
        match job.request:
            case Describe():
                job.finish(GRAPH)
            case ProfileStages(spec=spec):
                if self.prices:
                    job.finish(pipelines.priced(GRAPH, spec))
            case FindJointPlan(profile=profile, graph=graph, wish=wish):
                if not self.waits:
                    self.plan(job, lambda: joint_plan(profile, graph, wish))
            case RunPipeline(spec=spec):
                if not self.waits:
                    job.finish(self.run(spec))

    def plan(self, job: FakeJob, look: Callable[[], JointPlan]) -> None:
        try:
            job.finish(look())
        except ExplorerError as error:
            job.finish(failure=Failure(kind="bad input", sentence=error.sentence, hint=error.hint))

    def run(self, spec: RunSpec) -> Any:
        ran = pipelines.ran(GRAPH, spec)
        if self.ended is None:
            return ran
        failure, rank = self.ended
        return msgspec.structs.replace(ran, failure=failure, failed_rank=rank, gradients=(), composed=None)


def say(at: AppTest, **marks: Any) -> AppTest:
    """A click in the graph, as the browser tells it."""
    at.session_state[pipeline_state.WIDGET] = message(at, **marks)
    return settled(at.run())


def policy(at: AppTest) -> Policy:
    policy: Policy = at.session_state["draft"].spec.policy
    return policy


def chosen(at: AppTest, name: str) -> Any:
    """A choice of the plan, as the page holds it."""
    split = at.session_state["pipeline"]
    return getattr(split.choices, name)


def press(at: AppTest, key: str) -> AppTest:
    return settled(at.button(key=key).click().run())


def run(at: AppTest) -> AppTest:
    return press(at, "pipeline_run")


def stages_at(at: AppTest) -> list[int]:
    """How many blocks of the chain each stage has."""
    labels = graph_data(at)["labels"]
    stages = [labels[fqn][5] for fqn in GRAPH.chain]
    return [stages.count(stage) for stage in range(max(stages) + 1)]


def open_tab(at: AppTest, name: str) -> AppTest:
    at.session_state["pipeline_tabs"] = name
    return settled(at.run())


@pytest.fixture
def pipeline_worker() -> PipelineWorker:
    return PipelineWorker()


@pytest.fixture
def visit(pipeline_worker: PipelineWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """A visit to the Pipeline page."""
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "worker", lambda: pipeline_worker)
    monkeypatch.setattr(backend, "samples", lambda: SAMPLES)

    def start(*, waiting: bool = False, **query: str) -> AppTest:
        at = at_address(AppTest.from_string(SCRIPT, default_timeout=60), query)
        return at.run().run() if waiting else settled(at.run())

    yield start
    st.cache_resource.clear()
