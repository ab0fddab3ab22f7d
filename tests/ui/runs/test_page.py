"""The list of runs: open, rename, pin, delete, carry elsewhere; a file that is no run is one sentence."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import streamlit
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import Compare, Measure
from explorer.jobs.store import Store
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.evidence import evidence_of
from explorer.record import Failure, ModelRef, Policy, RunSpec
from explorer.record.base import to_plain
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.pipeline_run import PipelineRun
from explorer.record.policy_file import PolicyFile
from explorer.ui.runs.points import points_of
from explorer.ui.session import address as link
from explorer.ui.session import backend, known, opened
from explorer.ui.shared.reports import charts_bytes, report_bytes
from tests import graphs, pipelines
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle, texts
from tests.view.report import kinds

ALL = tuple(f"blocks.{i}" for i in range(6))
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"), policy=Policy.recompute(ALL))
SCRIPT = """
import streamlit as st
from explorer.ui.runs import page as runs
st.switch_page = lambda page: st.session_state.update(switched=page)
st.session_state.setdefault("pages", {"explore": "explore", "pipeline": "pipeline"})
runs.page()
"""

TAKEN = """
from explorer.ui.pipeline import state
state.current()
"""


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def runs_page(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    monkeypatch.setattr(backend, "worker", lambda: worker)
    monkeypatch.setattr(backend, "store", Store)

    def start(*selected: int) -> AppTest:
        at = AppTest.from_string(SCRIPT, default_timeout=60).run()
        assert not at.exception, at.exception[0].message
        return select(at, *selected)

    return start


def select(at: AppTest, *rows: int) -> AppTest:
    """Ticks these rows of the list."""
    if rows:
        table = f"runs_{at.session_state['runs'].order}"
        at.session_state[table] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
        at.run()
        assert not at.exception, at.exception[0].message
    return at


def saved(store: Store, name: str = "mine") -> str:
    return store.save(graphs.compared(graphs.gpt(6), SPEC), name)


def test_an_empty_store_says_how_to_fill_it(runs_page: Callable[..., AppTest]) -> None:
    assert "No run yet" in texts(runs_page())


def test_every_run_is_listed_with_its_figures(runs_page: Callable[..., AppTest], store: Store) -> None:
    saved(store)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["name"] == "mine"
    assert row["step peak"] == "104.5 MiB → 34.5 MiB"
    assert row["gradients"] == "bitwise equal"


def test_the_list_says_what_a_run_costs(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    store.save(pair.baseline, "alone")
    store.save(pair, "both")
    rows = {row["name"]: row for row in runs_page().dataframe[0].value.to_dict("records")}
    both = pair.headlines()
    assert rows["both"]["FLOPs"] == f"+{both['flop_ratio'] - 1:.0%}".replace("%", " %")
    assert rows["alone"]["FLOPs"].endswith("FLOP")
    assert rows["both"]["step time"].startswith("×") and rows["alone"]["step time"].endswith(" ms")


def test_two_runs_are_compared_in_words(runs_page: Callable[..., AppTest], store: Store) -> None:
    saved(store, "one")
    saved(store, "other")
    at = runs_page(0, 1)
    figures = {row["figure"]: row for row in at.dataframe[-1].value.to_dict("records")}
    assert figures["Step peak"] == {"figure": "Step peak", "other": "34.5 MiB", "one": "34.5 MiB"}
    assert not any("_" in name for name in figures)


def test_any_number_of_runs_stand_side_by_side_and_go_together(runs_page: Callable[..., AppTest], store: Store) -> None:
    for name in ("same", "same", "other"):
        saved(store, name)
    at = runs_page(0, 1, 2)
    rows = at.dataframe[-1].value.to_dict("records")
    assert list(rows[0]) == ["figure", "other", "same (2)", "same (3)"]
    at.button(key="delete_several").click().run()
    assert "They cannot be brought back" in texts(at) and len(store.list()) == 3, "asked first"


def test_a_note_stays_beside_its_run(runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = saved(store)
    at = runs_page(0)
    at.text_input(key=f"note_{run_id}").set_value(" half the time, see the talk ").run()
    at.button(key="save_note").click().run()
    assert [run.note for run in store.list()] == ["half the time, see the talk"]
    (row,) = at.dataframe[0].value.to_dict("records")
    assert row["note"] == "half the time, see the talk"
    assert at.button(key="save_note").disabled, "the row stays selected, and there is nothing left to save"


def test_the_list_is_of_one_model_and_sorted_by_figures(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    store.save(pair.candidate, "low")
    store.save(pair.baseline, "high")
    other = msgspec.structs.replace(SPEC, model=ModelRef(target="sample_models/unet.py"))
    store.save(msgspec.structs.replace(pair.baseline, spec=other), "foreign")
    at = runs_page()
    assert [row["name"] for row in at.dataframe[0].value.to_dict("records")] == ["foreign", "high", "low"]
    at.selectbox(key="runs_model").select("sample_models/gpt.py").run()
    at.selectbox(key="runs_sort").select("least peak").run()
    rows = at.dataframe[0].value.to_dict("records")
    assert [row["name"] for row in rows] == ["low", "high"] and rows[0]["peak (MiB)"] < rows[1]["peak (MiB)"]


def test_the_runs_of_a_model_are_points_and_a_click_selects_one(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    saved(store, "both")
    run_id = store.save(graphs.compared(graphs.gpt(6), SPEC).baseline, "alone")
    placed = points_of(store.list())
    assert [(run.name, point.name) for run, point in placed] == [
        ("alone", "alone"), ("both", "both"), ("both", "everything kept")
    ]  # fmt: skip
    assert placed[1][1].verdict == "bitwise equal" and not placed[1][1].keeps_all and placed[2][1].keeps_all
    assert {point.conditions for _, point in placed} == {"small, cpu"}
    at = runs_page()
    at.session_state["run_plane"] = {"selection": {"points": [{"customdata": {"0": 0}}]}}
    assert at.get("plotly_chart"), "two points or more are drawn"
    state = at.session_state["runs"]
    state.select, state.order = run_id, state.order + 1  # what a click on a point leaves
    at.run()
    assert at.text_input(key=f"name_{run_id}").value == "alone"


def test_a_run_that_was_cut_short_has_no_arrow_in_the_list(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    failure = Failure(kind="out of memory", sentence="Out of memory.")
    baseline = msgspec.structs.replace(pair.baseline, failure=failure)
    store.save(msgspec.structs.replace(pair, baseline=baseline, gradients=(), failure=failure), "cut")
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["step peak"] == "at least 104.5 MiB, then failed; 34.5 MiB"


def test_a_pipeline_run_shows_its_highest_rank_and_every_gradient(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    graph = graphs.gpt(6)
    run = pipelines.ran(graph, RunSpec(model=graph.model, plan=pipelines.planned(graph)), n_moved=1)
    store.save(run, "split")
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    peaks = [memory.peak_bytes for memory in run.memory]
    assert row["step peak"] == f"{max(peaks) / 2**20:.1f} MiB on rank {peaks.index(max(peaks))}"
    assert row["gradients"] == f"{len(run.gradients) - 1} of {len(run.gradients)} equal"


def test_a_file_that_is_no_run_is_one_sentence(runs_page: Callable[..., AppTest], store: Store) -> None:
    for data in (b"", b"garbage", saved_file(store)[:-7], saved_file(store).replace(b"\n", b"\r", 1)):
        at = runs_page()
        at.file_uploader(key="upload_run").upload("x.run", data)
        at.run()
        assert not at.exception
        assert len(at.error) == 1, data[:30]


def saved_file(store: Store) -> bytes:
    run_id = saved(store)
    data = store.export_file(run_id)
    store.delete(run_id)
    return data


def test_a_run_file_comes_back_in(runs_page: Callable[..., AppTest], store: Store) -> None:
    data = saved_file(store)
    at = runs_page()
    at.file_uploader(key="upload_run").upload("x.run", data)
    at.run()
    (run,) = store.list()
    assert store.load(run.run_id) == graphs.compared(graphs.gpt(6), SPEC)
    assert "was added" in at.success[0].value


def test_files_of_ranks_that_are_chosen_together_become_one_run(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    files = [run_file.write(run_file.stored_record(run)) for run in kinds.ranks().ranks]
    at = runs_page()
    for i, data in enumerate([*files, saved_file(store)]):
        at.file_uploader(key="upload_run").upload(f"{i}.run", data)
    at.run()
    assert not at.exception and not at.error
    kept = {run.kind: run for run in store.list()}
    assert set(kept) == {"recorded ranks", "comparison"} and len(store.list()) == 2
    assert kept["recorded ranks"].name == "train.py, step 2, 2 of 3 ranks"
    row = next(row for row in at.dataframe[0].value.to_dict("records") if row["kind"] == "recorded ranks")
    assert row["step peak"] == "at least 245.0 MiB, then failed on rank 1"


def test_ranks_stand_side_by_side_and_each_opens_as_a_run_of_its_own(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    store.save(kinds.ranks(), "both")
    at = runs_page(0)
    assert [row["rank"] for row in at.dataframe[-1].value.to_dict("records")] == [0, 1]
    assert len(at.get("plotly_chart")) == 2
    for _ in range(2):  # the second time it is listed already
        at = at.button(key="open_rank").click().run()
        assert not at.exception and at.session_state["switched"] == "explore"
    (alone,) = (run for run in store.list() if run.kind == "measurement")
    assert alone.name == "both, rank 1" and at.session_state[opened.KEY] == ["explore", alone.run_id]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_of_run_has_a_report_there(kind: str, runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = store.save(kinds.KINDS[kind], "mine")
    assert "Report" in [button.label for button in runs_page(0).get("download_button")]
    assert "<h1>mine</h1>" in report_bytes(run_id).decode()


def test_a_report_is_there_for_runs_that_have_one(runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = saved(store)
    at = select(runs_page(), 0)
    assert [button.label for button in at.get("download_button")] == ["Export", "Report"]
    text = report_bytes(run_id).decode()
    assert "mine" in text and "104.5 → 34.5 MiB" in text
    with zipfile.ZipFile(io.BytesIO(charts_bytes(run_id))) as files:
        assert "memory-timeline.svg" in files.namelist() and len(files.namelist()) == 13


def test_a_store_that_cannot_be_read_is_one_sentence(runs_page: Callable[..., AppTest], store: Store) -> None:
    Path(store.path).write_bytes(b"no database")
    at = runs_page()
    assert len(at.error) == 1


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


def test_a_pinned_run_is_the_baseline_of_new_ones(app: Callable[..., AppTest], worker: FakeWorker) -> None:
    at = app()
    at.session_state["pinned"] = [to_plain(SPEC)]
    at = settle(at.run())
    at = settle(at.button(key="run").click().run())
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == SPEC.policy
    assert job.request.candidate.policy == Policy()


def test_rename_and_pin_reach_the_store_and_delete_asks_first(runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = saved(store)
    at = runs_page(0)
    assert at.button(key="rename").disabled
    at.text_input(key=f"name_{run_id}").set_value("  all recomputed ").run()
    at.button(key="rename").click().run()
    assert [run.name for run in store.list()] == ["all recomputed"]
    at.button(key="pin").click().run()
    assert [run.pinned for run in store.list()] == [True]
    assert [plain["policy"] for plain in at.session_state["pinned"]] == [to_plain(SPEC)["policy"]]
    assert "Select a row" in texts(at), "a pinned run moves up, so that its row is another run's now"
    select(at, 0).button(key="pin").click().run()
    assert [run.pinned for run in store.list()] == [False]
    assert at.session_state["pinned"] == []
    select(at, 0).button(key="delete").click().run()
    assert store.list(), "nothing is deleted before it was confirmed"
    assert "cannot be brought back" in texts(at)


def test_a_pin_outlives_the_visit_and_needs_no_other_run(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    store.pin(saved(store))
    at = app()
    assert not worker.of(Measure), "the store holds the run that was pinned"
    assert figures(at)["Step peak"] == "34.5 MiB"


def test_a_pinned_baseline_is_named_and_keeps_its_forecast(app: Callable[..., AppTest], store: Store) -> None:
    """The forecast is made from the run that kept everything, which is in the store."""
    store.pin(saved(store))
    at = say(app(), on=["blocks.0"])
    assert "pinned baseline" in texts(at) and r"recompute 6 blocks" in texts(at)
    assert figures(at)["Step peak"].startswith("34.5 → ≈")
    assert figures(at)["FLOPs"].startswith("≈ \N{MINUS SIGN}"), "against the pinned run, which recomputes more"
    assert "predicted, against the pinned baseline" in texts(at)
    assert graph_data(at)["labels"]["blocks"][0].startswith("90.0 → ≈"), "of kept blocks, not of recomputed ones"


def test_a_comparison_with_a_pinned_baseline_says_so_everywhere(
    app: Callable[..., AppTest], runs_page: Callable[..., AppTest], store: Store
) -> None:
    policy = Policy.recompute(ALL[:1])
    pair = graphs.compared(graphs.gpt(6), msgspec.structs.replace(SPEC, policy=policy))
    pair = msgspec.structs.replace(pair, baseline=graphs.measured(graphs.gpt(6), SPEC))
    evidence = evidence_of(pair)
    assert evidence is not None and evidence.baseline_policy == SPEC.policy
    assert policy_file.loads(policy_file.dumps(PolicyFile(policy=policy, evidence=evidence))).evidence == evidence
    store.save(pair)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["step peak"] == "34.5 MiB (6 blocks recomputed) → 90.0 MiB"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_refresh_shows_what_was_measured(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store, restarted: bool
) -> None:
    """Also after the app was started again: then the store says it. And a policy that ran before is measured."""
    at = settle(say(app(), on=list(ALL)).button(key="run").click().run())
    at = settle(say(at, on=["head"]).button(key="run").click().run())
    assert figures(say(at, on=list(ALL)))["Step peak"] == "104.5 → 34.5 MiB"
    n_runs = len(worker.of(Compare)), len(worker.of(Measure))
    if restarted:
        graph = backend.graph_of(SPEC)
        streamlit.cache_resource.clear()
        backend.records().keep(backend.graph_key(SPEC.model, SPEC.device), graph)
    again = app(**link.to_query(SPEC))
    assert figures(again)["Step peak"] == "104.5 → 34.5 MiB"
    assert figures(again)["Gradients"] == "bitwise equal"
    assert (len(worker.of(Compare)), len(worker.of(Measure))) == n_runs


def test_a_run_of_another_machine_or_of_older_code_is_not_shown_as_measured_here(
    app: Callable[..., AppTest], store: Store, tmp_path: Path
) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    elsewhere = msgspec.structs.replace(pair.candidate.environment, platform="Plan 9")
    store.save(msgspec.structs.replace(pair, candidate=msgspec.structs.replace(pair.candidate, environment=elsewhere)))
    assert figures(app(**link.to_query(SPEC)))["Gradients"] == "not compared"
    changed = tmp_path / "model.py"
    changed.write_text("# younger than the run\n")
    run = store.list()[0]
    assert known._is_current(run, f"{changed}:build") is False


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


def test_a_run_that_could_not_be_saved_says_so_and_stays(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    worker.warning = "The run could not be saved: the disk is full."
    at = app()
    assert "the disk is full" in at.warning[0].value
    at = settle(at.button(key="run").click().run())
    assert figures(at)["Gradients"] == "bitwise equal"
    assert "the disk is full" in at.warning[0].value
    assert store.list() == ()
    from explorer.jobs import run_file
    from explorer.ui.explore.files import run_bytes

    key = at.session_state["explore"].shown
    assert run_file.read(run_bytes(key)).kind == "comparison"
