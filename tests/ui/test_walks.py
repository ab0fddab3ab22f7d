"""Every kind of link, on a store and a worker that know the model or not: no page is dead with nothing to say.

A page is alive if it draws the graph, waits for a job, or says in words why it can do neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import streamlit as st
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import Describe
from explorer.jobs.store import Store
from explorer.record import Failure, Measurement, ModelRef, Policy, RunSpec
from explorer.record.run import PipelinePlan, Ranks
from explorer.ui.session import address, backend
from explorer.ui.session.repository import runs
from tests import graphs
from tests.pipeline.driver import PipelineWorker
from tests.ui.conftest import SAMPLES
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import WINDOW, component_data, texts

GRAPH = graphs.gpt(6)
MODEL = ModelRef(target="sample_models/gpt.py", size="small")
PLAIN = RunSpec(model=MODEL)
RECORDED = ModelRef(target="recorded: train.py")
PLAN = PipelinePlan(stages=(("blocks.0",), ("blocks.1", "blocks.2")), n_microbatches=2, schedule="<b>")
SPECS = {
    "plain": PLAIN,
    "large": replace(PLAIN, model=replace(MODEL, size="gpu")),
    "policy": replace(PLAIN, policy=Policy.recompute(["blocks.0"])),
    "unknown block": replace(PLAIN, policy=Policy.recompute(["nowhere"])),
    "plan": replace(PLAIN, seed=7, plan=PLAN),
    "known schedule": replace(PLAIN, plan=replace(PLAN, schedule="1F1B")),
    "options": replace(PLAIN, seed=7, mode="eval"),
    "ranks": replace(PLAIN, ranks=Ranks(n_ranks=2, data="ddp")),
    "recorded": replace(PLAIN, model=RECORDED),
    "not offered": replace(PLAIN, model=ModelRef(target="os:system")),
    "weights": replace(PLAIN, model=replace(MODEL, weights="/etc/passwd")),
    "no size": replace(PLAIN, model=replace(MODEL, size="huge")),
}
LINKS: dict[str, dict[str, str]] = {
    "nothing": {},
    **{name: address.to_query(spec) for name, spec in SPECS.items()},
    "cuts": {**address.to_query(PLAIN), "cuts": "1.2", "schedule": "<b>", "microbatches": "x"},
    "predict": {**address.to_query(PLAIN), "predict": "1"},
    "predicted plan": {**address.to_query(SPECS["plan"]), "predict": "1"},
    "lost job": {**address.to_query(PLAIN), "job": "gone"},
    "cut short": {**address.to_query(SPECS["policy"]), "run": "eJx"},
}
PAGES = {
    "explore": "from explorer.ui.explore import page\npage.page()\n",
    "pipeline": "from explorer.pipeline.ui import page\npage.page()\n",
}
FAILED = Failure(kind="crash", sentence="The worker is gone.", hint="Run it again.")


def stored(store: str) -> None:
    """The runs of a home: none, of this machine, of the plan's link alone, from a file, or damaged by hand."""
    run = replace(graphs.measured(GRAPH, PLAIN), graph=GRAPH)
    if store == "own":
        Store().save(run)
        Store().save(graphs.compared(GRAPH, SPECS["policy"]))
    elif store == "of the plan":
        Store().save(replace(run, spec=replace(SPECS["plan"], policy=PLAIN.policy)))
    elif store == "without a graph":
        Store().save(replace(run, graph=None))
    elif store == "imported":
        elsewhere = replace(run.environment, platform="Elsewhere-1")
        Store().import_file(run_file.write(run_file.stored_record(replace(run, environment=elsewhere))))


def is_alive(at: AppTest, page: str) -> bool:
    """Drawn, waiting, or in words; a message that points at an empty place does not count."""
    drawn = any("geometry" in data for data in component_data(at))
    said = [element.value for element in (*at.warning, *at.error, *at.info)]
    failed = [element for element in at.text if element.value]
    return drawn or at.session_state[page].job.id is not None or bool(said) or bool(failed)


class Answers:
    """A worker that answers, never answers, or fails at descriptions."""

    def __init__(self, kind: str, page: str) -> None:
        self.kind = kind
        self.worker = PipelineWorker() if page == "pipeline" else FakeWorker(GRAPH, store=Store())
        self._answer = self.worker.answer
        self.worker.answer = self.answer  # type: ignore[method-assign]

    def answer(self, job: FakeJob) -> None:
        if self.kind == "fails" or (self.kind == "cannot describe" and isinstance(job.request, Describe)):
            job.finish(failure=FAILED)
        elif self.kind != "waits":
            self._answer(job)


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    def start(page: str, worker: Any, query: dict[str, str], *, window: bool, graph: bool) -> AppTest:
        st.cache_resource.clear()
        monkeypatch.setattr(backend, "worker", lambda: worker)
        monkeypatch.setattr(backend, "samples", lambda: SAMPLES)
        monkeypatch.setattr(backend, "store", Store)
        if graph:
            runs().add_graph(MODEL, "cpu", GRAPH)
        at = AppTest.from_string(PAGES[page], default_timeout=60)
        at.session_state["pages"] = {name: name for name in ("explore", "pipeline", "lab", "runs")}
        for name, value in query.items():
            at.query_params[name] = value
        if window:
            at.session_state["window"], at.session_state["plotly"] = WINDOW, True
        at.run()
        if any("geometry" in data for data in component_data(at)):  # the graph reports its window
            at.session_state["window"] = WINDOW
        at.run()
        assert not at.exception, (query, at.exception[0].message)
        return at

    return start


TELLING = ("plain", "plan", "predicted plan", "ranks", "recorded")
"""Links that differ in what the page needs before it can draw."""


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["answers", "waits", "fails", "cannot describe"])
@pytest.mark.parametrize("store", ["empty", "own", "of the plan", "without a graph", "imported"])
@pytest.mark.parametrize("page", PAGES)
def test_every_link_ends_in_a_graph_or_a_sentence(page: str, store: str, answers: str, visit: Any) -> None:
    if page == "pipeline" and (store not in ("empty", "own") or answers == "cannot describe"):
        pytest.skip("the Pipeline page reads no runs of these stores")
    stored(store)
    dead = []
    for name in LINKS if (store, answers) == ("empty", "fails") else TELLING:
        at = visit(page, Answers(answers, page).worker, LINKS[name], window=False, graph=name == "known schedule")
        if not is_alive(at, page):
            dead.append((name, texts(at)[-200:]))
    assert not dead, dead


def test_a_link_with_a_plan_after_a_restart_is_drawn(visit: Any) -> None:
    """The store knows the step of exactly this link, and a new server knows no graph."""
    stored("of the plan")
    at = visit("explore", FakeWorker(GRAPH, store=Store()), LINKS["plan"], window=False, graph=False)
    assert is_alive(at, "explore"), texts(at)
    assert any("geometry" in data for data in component_data(at))


def test_a_recorded_run_that_was_deleted_says_so(visit: Any) -> None:
    run = replace(graphs.measured(GRAPH, PLAIN), origin="recorded", graph=GRAPH, spec=SPECS["recorded"])
    assert isinstance(run, Measurement)
    run_id = Store().save(run)
    at = visit("explore", FakeWorker(GRAPH, store=Store()), LINKS["recorded"], window=True, graph=False)
    assert is_alive(at, "explore")
    Store().delete(run_id)
    runs().of("record")._values.clear()
    at.run()
    assert is_alive(at, "explore"), texts(at)


def test_the_walk_sees_a_dead_page(visit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorer.ui.explore import work

    monkeypatch.setattr(work, "prepare", lambda state: None)
    at = visit("explore", FakeWorker(GRAPH, store=Store()), LINKS["options"], window=True, graph=False)
    assert not is_alive(at, "explore")
