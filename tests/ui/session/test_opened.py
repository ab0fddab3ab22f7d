"""A stored run on its way to the page that shows it: nothing runs for it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import model_of_request
from explorer.jobs.store import Store
from explorer.record import ModelRef
from explorer.record.pipeline_run import PipelineRun
from explorer.record.run import PipelinePlan
from explorer.ui.session import backend, opened
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, settle, texts
from tests.ui.runs.listing import ALL, SPEC, TAKEN, saved


def test_opening_a_run_of_a_model_that_is_not_offered_runs_nothing(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    at = app()
    n_jobs = len(worker.jobs)
    foreign = msgspec.structs.replace(SPEC, model=ModelRef(target="/tmp/evil.py:build"))
    run_id = store.save(graphs.compared(graphs.gpt(6), foreign), "foreign")
    at.session_state[opened.KEY] = ["explore", run_id]
    at = settle(at.run())
    assert len(worker.jobs) == n_jobs
    assert "is not offered here" in texts(at)
    assert figures(at)["Step peak"] == "104.5 → 34.5 MiB"


def test_the_blocks_of_a_model_that_is_not_offered_are_those_of_its_file(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    at = app()
    foreign = msgspec.structs.replace(SPEC, model=ModelRef(target="/tmp/evil.py:build"))
    brings = run_file.with_graph(graphs.compared(graphs.gpt(6), foreign), graphs.gpt(6))
    at.session_state[opened.KEY] = ["explore", store.save(brings, "foreign")]
    at = settle(at.run())
    assert graph_data(at)["on"] == list(ALL)
    at = settle(at.button(key="run").click().run())
    assert "is not offered here" in texts(at)
    assert not [job for job in worker.jobs.values() if model_of_request(job.request) == foreign.model.target]


def test_a_file_does_not_say_what_an_offered_model_looks_like(app: Callable[..., AppTest], store: Store) -> None:
    at = app()
    forged = run_file.with_graph(graphs.compared(graphs.gpt(6), SPEC), graphs.gpt(2))
    at.session_state[opened.KEY] = ["explore", store.save(forged, "forged")]
    at = settle(at.run())
    assert backend.graph_of(SPEC) == graphs.gpt(6)


def test_opening_a_run_brings_its_figures_back(
    app: Callable[..., AppTest], worker: FakeWorker, runs_page: Callable[..., AppTest], store: Store
) -> None:
    run_id = saved(store)
    at = runs_page(0)
    at.button(key="open").click().run()
    assert at.session_state["switched"] == "explore"
    explored = app()
    explored.session_state[opened.KEY] = at.session_state[opened.KEY]
    n_jobs = len(worker.jobs)
    explored = settle(explored.run())
    assert explored.session_state["explore"].shown == run_id
    assert figures(explored)["Step peak"] == "104.5 → 34.5 MiB" and len(worker.jobs) == n_jobs


def test_a_pipeline_run_opens_on_its_own_page(runs_page: Callable[..., AppTest], store: Store) -> None:
    plan = PipelinePlan(stages=(ALL[:3], ALL[3:]), n_microbatches=8, schedule="1F1B")
    spec = msgspec.structs.replace(SPEC, plan=plan)
    measured = graphs.compared(graphs.gpt(6), SPEC).candidate
    run = PipelineRun(spec=spec, engine="replay", environment=measured.environment, rows=(("0F0",), ("1F0",)))
    run_id = store.save(run)
    at = runs_page(0)
    at.button(key="open").click().run()
    assert at.session_state["switched"] == "pipeline"
    shows = AppTest.from_string(TAKEN, default_timeout=60)
    shows.session_state[opened.KEY] = at.session_state[opened.KEY]
    split = shows.run().session_state["pipeline"]
    assert (split.shown, split.places, split.choices.n_microbatches, split.engine) == (run_id, [3], 8, "replay")
    assert split.draft.spec == SPEC and opened.KEY not in shows.session_state
