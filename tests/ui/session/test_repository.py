"""The repository: a run is found by its request and answers no other one; opened runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import streamlit as st
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import FindPlans, models_of
from explorer.jobs.store import Store
from explorer.pipeline.record.step import PipelineRun
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.record import Failure, Measurement, ModelRef, Policy, RunSpec
from explorer.record.files import PolicyFile
from explorer.record.measurement import Refused, Times
from explorer.record.run import PipelinePlan
from explorer.ui.session import backend, repository
from explorer.ui.session.repository import OPENED, Recent, Runs, runs
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import ALL, SPEC, figures, graph_data, saved, settle, texts

GRAPH = graphs.gpt(6)
BASE = RunSpec(model=ModelRef(target="models/nowhere.py"))
CANDIDATE = replace(BASE, policy=Policy.recompute(["head"]))
App = Callable[..., AppTest]


def test_the_oldest_value_makes_room() -> None:
    recent: Recent[str] = Recent(limit=2)
    for key in ("a", "b"):
        recent.add(key, key)
    assert recent.get("a") == "a" == recent.get_or_make("a", lambda: "other")
    assert recent.get_or_make("c", lambda: "c") == "c"
    assert recent.get("b") is None and recent.get("a") == "a"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """The repository of a server with an empty store."""
    st.cache_resource.clear()
    monkeypatch.setattr(backend, "store", Store)
    yield runs()
    st.cache_resource.clear()


def run(spec: RunSpec = BASE, **changed: object) -> Measurement:
    return replace(graphs.measured(GRAPH, spec), **changed)


def test_a_run_answers_for_exactly_what_it_ran(known: Runs) -> None:
    known.add("alone", run())
    assert known.measured(BASE) == ("alone", run())
    assert known.measured(replace(BASE, seed=1)) is None and known.measured(CANDIDATE) is None
    pair = graphs.compared(GRAPH, CANDIDATE)
    failure = Failure(kind="out of memory", sentence="Out of memory.")
    known.add("half", replace(pair, candidate=replace(pair.candidate, failure=failure)))
    assert known.measured(CANDIDATE) is None and known.points(BASE) == (), "it did not go to its end"
    known.add("pair", pair)
    measured = known.measured(CANDIDATE)
    assert measured is not None and measured.key == "pair" and measured.run.spec == CANDIDATE
    assert known.compared(BASE, CANDIDATE) == "pair" and known.compared(CANDIDATE, BASE) is None
    assert [point.policy for point in known.points(BASE)] == [CANDIDATE.policy]
    other = replace(BASE, seed=2)
    refused = Refused(what="everything kept", policy=Policy(), held_peak_bytes=1, failed_in="forward")
    fitted = run(replace(CANDIDATE, seed=2), refused=(refused,))
    known.add("fits", fitted)
    assert known.fitted(other) == ("fits", fitted) and known.measured(other) is None


def test_a_baseline_with_the_prices_of_a_plan_goes_on_answering(known: Runs) -> None:
    priced = run(times=Times(clock="process CPU time", checkpoint_ms=0.5))
    known.add("priced", priced)
    known.add("pair", graphs.compared(GRAPH, CANDIDATE))
    assert known.measured(BASE) == ("priced", priced), "runs of comparisons have no prices"
    known.drop("priced")
    known.add("pair", graphs.compared(GRAPH, CANDIDATE))
    assert known.measured(BASE)[0] == "pair"  # type: ignore[index]


@pytest.mark.parametrize("change", [{"failure": Failure(kind="crash", sentence="It ended.")}, {"origin": "predicted"}])
def test_a_run_cut_short_and_a_prediction_answer_nothing(known: Runs, change: dict[str, object]) -> None:
    known.add("half", run(**change))
    assert known.measured(BASE) is None


def test_kinds_do_not_push_each_other_out(known: Runs) -> None:
    """A hundred predictions leave the graph of the model and the measured run where they are."""
    known.add_graph(BASE.model, "cpu", GRAPH)
    known.add("alone", run())
    for seed in range(100):
        known.add_prediction(replace(BASE, seed=seed), run(replace(BASE, seed=seed), origin="predicted"))
    assert known.graph(BASE) == GRAPH and known.measured(BASE) is not None
    assert known.prediction(BASE) is None and known.prediction(replace(BASE, seed=99)) is not None


def test_a_deleted_run_is_forgotten_also_if_another_window_deleted_it(known: Runs) -> None:
    known.add("pair", graphs.compared(GRAPH, CANDIDATE))
    known.drop("pair")
    assert known.compared(BASE, CANDIDATE) is None and known.points(BASE) == ()
    known.add("gone", run())
    known.of("record").drop(run())
    assert known.measured(BASE) is None, "memory and store have it no more"


def test_a_new_visit_reads_runs_of_this_machine(known: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run()
    monkeypatch.setattr(repository.platform, "platform", lambda terse: here.environment.platform)
    elsewhere = replace(run(CANDIDATE), environment=replace(here.environment, platform="elsewhere"))
    run_id = Store().save(here)
    Store().save(elsewhere)
    assert known.measured(BASE) == (run_id, here) and known.measured(CANDIDATE) is None
    later = Store().save(run(CANDIDATE))
    assert known.measured(CANDIDATE) == (later, run(CANDIDATE)), "another process saved it while this visit waits"


def test_a_comparison_with_a_baseline_that_recomputes_says_so_everywhere(runs_page: App, store: Store) -> None:
    policy = Policy.recompute(ALL[:1])
    pair = graphs.compared(GRAPH, replace(SPEC, policy=policy))
    pair = replace(pair, baseline=graphs.measured(GRAPH, SPEC))
    evidence = evidence_of(pair)
    assert evidence is not None and evidence.baseline_policy == SPEC.policy
    assert policy_file.loads(policy_file.dumps(PolicyFile(policy=policy, evidence=evidence))).evidence == evidence
    store.save(pair)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["step peak"] == "34.5 → 90.0 MiB (6 blocks recomputed in the baseline)"


def test_a_run_of_a_model_that_is_not_offered_runs_nothing(app: App, worker: FakeWorker, store: Store) -> None:
    at = app()
    n_jobs = len(worker.jobs)
    foreign = replace(SPEC, model=ModelRef(target="/tmp/evil.py:build"))
    at.session_state[OPENED] = ["explore", store.save(graphs.compared(GRAPH, foreign), "without a graph")]
    at = settle(at.run())
    assert "is not offered here" in texts(at) and figures(at)["Step peak"] == "104.5 → 34.5 MiB"
    with_graph = run_file.with_graph(graphs.compared(GRAPH, foreign), GRAPH)
    at.session_state[OPENED] = ["explore", store.save(with_graph, "with its graph")]
    at = settle(at.run())
    assert graph_data(at)["on"] == list(ALL) and len(worker.jobs) == n_jobs + len(worker.of(FindPlans)[1:])
    at = settle(at.button(key="run").click().run())
    assert "is not offered here" in texts(at)
    assert not [job for job in worker.jobs.values() if foreign.model in models_of(job.request)]
    forged = run_file.with_graph(graphs.compared(GRAPH, SPEC), graphs.gpt(2))
    at.session_state[OPENED] = ["explore", store.save(forged, "forged")]
    settle(at.run())
    assert runs().graph(SPEC) == GRAPH, "a file does not say what an offered model looks like"


def test_an_opened_run_brings_its_figures(app: App, worker: FakeWorker, runs_page: App, store: Store) -> None:
    def state_of_the_page() -> None:
        from explorer.pipeline.ui import state

        state.current()

    plan = PipelinePlan(stages=(ALL[:3], ALL[3:]), n_microbatches=8, schedule="1F1B")
    environment = graphs.compared(GRAPH, SPEC).candidate.environment
    spec = replace(SPEC, plan=plan)
    ran = PipelineRun(spec=spec, engine="replay", environment=environment, rows=(("0F0",), ("1F0",)))
    kept_id, run_id = saved(store), store.save(ran)
    at = runs_page(1).button(key="open").click().run()
    assert at.session_state["switched"] == "explore"
    explored = app()
    explored.session_state[OPENED] = at.session_state[OPENED]
    n_jobs = len(worker.jobs)
    explored = settle(explored.run())
    assert explored.session_state["explore"].shown == kept_id
    assert figures(explored)["Step peak"] == "104.5 → 34.5 MiB" and len(worker.jobs) == n_jobs
    ids = [run.run_id for run in store.list()]
    at = runs_page(ids.index(run_id)).button(key="open").click().run()
    assert at.session_state["switched"] == "pipeline"
    opened = AppTest.from_function(state_of_the_page, default_timeout=60)
    opened.session_state[OPENED] = at.session_state[OPENED]
    split = opened.run().session_state["pipeline"]
    assert (split.shown, split.places, split.choices.n_microbatches) == (run_id, [3], 8)
    assert split.draft.spec == SPEC and OPENED not in opened.session_state


@pytest.mark.parametrize("how", ["imported", "other torch", "other machine", "own"])
def test_only_runs_of_this_machine_answer(known: Runs, how: str) -> None:
    """Also after a person has opened one: it is shown, and the next request is measured."""
    here = run()
    torch, system = ("2.0.0", here.environment.platform) if how == "other torch" else ("2.13.0", "Elsewhere-1")
    elsewhere = replace(here, environment=replace(here.environment, torch_version=torch, platform=system))
    pair = graphs.compared(GRAPH, CANDIDATE)
    if how == "imported":
        stored = replace(run_file.stored_record(here), created=run_file.LATEST)
        run_id = Store().import_file(run_file.write(stored))
        pair_id = Store().import_file(run_file.write(run_file.stored_record(pair)))
    else:
        run_id = Store().save(here if how == "own" else elsewhere)
        pair_id = Store().save(
            pair
            if how == "own"
            else replace(pair, candidate=replace(pair.candidate, environment=elsewhere.environment))
        )
    for _ in range(2):
        answers = (known.measured(BASE), known.compared(BASE, CANDIDATE), known.points(BASE))
        assert all(answers) if how == "own" else not any(answers), answers
        known.open(run_id)
        known.open(pair_id)


def test_a_forged_date_makes_no_run_the_gallerys_sample(known: Runs) -> None:
    from explorer.cli.verbs import report
    from explorer.plan.catalogue import catalogue

    sample = next(sample for sample in catalogue() if sample.name == "gpt")
    spec = replace(SPEC, model=ModelRef(target=sample.target, size="small"))
    pair = graphs.compared(GRAPH, spec)
    forged = replace(pair, candidate=replace(pair.candidate, graph=GRAPH))
    stored = replace(run_file.stored_record(forged), created=run_file.LATEST)
    Store().import_file(run_file.write(stored))
    assert report._stored(sample) is None
    own = replace(forged, candidate=replace(forged.candidate, peaks=replace(forged.candidate.peaks)))
    run_id = Store().save(replace(own, baseline=replace(own.baseline, warnings=("own",))))
    found = report._stored(sample)
    assert found is not None and found.run == Store().load(run_id)
