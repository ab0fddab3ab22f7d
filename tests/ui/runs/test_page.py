"""The list of runs: open, rename, delete, carry elsewhere; a file that is no run is one sentence."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest
import streamlit

from explorer.jobs import run_file
from explorer.jobs.protocol import Compare, Measure
from explorer.jobs.store import Store
from explorer.record import Failure, ModelRef, RunSpec
from explorer.ui.explore.files import run_bytes
from explorer.ui.runs.table import current, points_of, reorder
from explorer.ui.session import address as link
from explorer.ui.session import repository
from tests import graphs
from tests.pipeline import pipelines
from tests.plan.card.histories import framed_document
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import ALL, SPEC, App, figures, saved, say, select, settle, texts
from tests.view import reports as kinds


def test_every_kind_of_run_is_a_row_with_its_figures_and_a_model_may_be_chosen(runs_page: App, store: Store) -> None:
    assert "No run yet" in texts(runs_page())
    graph, pair, full = (
        graphs.gpt(6),
        graphs.compared(graphs.gpt(6), SPEC),
        Failure(kind="out of memory", sentence="O."),
    )
    split = pipelines.ran(graph, RunSpec(model=graph.model, plan=pipelines.planned(graph)), n_moved=1)
    cut = msgspec.structs.replace(pair.baseline, failure=full)
    foreign = msgspec.structs.replace(SPEC, model=ModelRef(target="sample_models/unet.py"))
    for name, run in {
        "alone": pair.baseline, "both": pair, "split": split, "low": pair.candidate,
        "cut": msgspec.structs.replace(pair, baseline=cut, gradients=(), failure=full),
        "foreign": msgspec.structs.replace(pair.baseline, spec=foreign),
    }.items():  # fmt: skip
        store.save(run, name)
    at = runs_page()
    rows = {row["name"]: row for row in at.dataframe[0].value.to_dict("records")}
    assert list(rows) == ["foreign", "cut", "low", "split", "both", "alone"], "the newest first"
    assert rows["both"]["step peak"] == "104.5 → 34.5 MiB" and rows["both"]["gradients"] == "bitwise equal"
    assert rows["both"]["FLOPs"] == f"+{pair.headlines()['flop_ratio'] - 1:.0%}".replace("%", " %")
    assert rows["alone"]["FLOPs"].endswith("FLOP")
    assert rows["both"]["step time"].startswith("×") and rows["alone"]["step time"].endswith(" ms")
    assert rows["cut"]["step peak"] == "at least 104.5 MiB, then failed; 34.5 MiB", "no arrow"
    peaks = [memory.peak_bytes for memory in split.memory]
    assert rows["split"]["step peak"] == f"{max(peaks) / 2**20:.1f} MiB on rank {peaks.index(max(peaks))}"
    assert rows["split"]["gradients"] == f"{len(split.gradients) - 1} of {len(split.gradients)} equal"
    at.selectbox(key="runs_model").select("sample_models/gpt.py").run()
    assert "foreign" not in list(at.dataframe[0].value["name"]) and len(at.dataframe[0].value) == 5
    assert rows["alone"]["peak (MiB)"] > rows["low"]["peak (MiB)"]
    Path(store.path).write_bytes(b"no database")
    assert len(runs_page().error) == 1, "a store that cannot be read is one sentence"


def test_a_file_that_is_no_run_is_one_sentence(runs_page: App, store: Store) -> None:
    for data in (b"", b"garbage", saved_file(store)[:-7], saved_file(store).replace(b"\n", b"\r", 1)):
        at = runs_page()
        at.file_uploader(key="upload_run").upload("x.run", data)
        at.run()
        assert not at.exception
        assert len(at.error) == 1, data[:30]


def test_a_snapshot_of_another_program_is_opened_and_drawn(runs_page: App, store: Store) -> None:
    at = runs_page()
    at.file_uploader(key="upload_run").upload("a.pickle", pickle.dumps(framed_document()))
    at.run()
    assert not at.exception and not at.error
    (run,) = store.list()
    assert (run.kind, run.name) == ("memory history", "a.pickle")
    at = select(runs_page(), 0)
    assert len(at.get("plotly_chart")) == 1
    rows = [row for frame in at.dataframe[1:] for row in frame.value.to_dict("records")]
    assert any(row.get("options") == "as recorded" and row["stranded"] == "8.0 MiB" for row in rows)
    assert any(row.get("module") == "block:31.linear" and row["at the peak"] == "9.0 MiB" for row in rows)
    assert not at.button(key="delete").disabled and "open" not in [button.key for button in at.button]


def saved_file(store: Store) -> bytes:
    run_id = saved(store)
    data = store.export_file(run_id)
    store.delete(run_id)
    return data


def test_a_run_file_comes_back_in(runs_page: App, store: Store) -> None:
    data = saved_file(store)
    at = runs_page()
    at.file_uploader(key="upload_run").upload("x.run", data)
    at.run()
    (run,) = store.list()
    assert store.load(run.run_id) == graphs.compared(graphs.gpt(6), SPEC)
    assert "was added" in at.toast[0].value
    store.rename(run.run_id, "by another name")
    again = runs_page()
    again.file_uploader(key="upload_run").upload("copy.run", data)
    again.run()
    assert "already here" in again.toast[0].value
    assert [one.name for one in store.list()] == ["by another name"], "content decides, not the name"


def test_files_of_ranks_that_are_chosen_together_become_one_run(runs_page: App, store: Store) -> None:
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


def test_a_refresh_shows_what_was_measured(app: App, worker: FakeWorker, store: Store) -> None:
    """Also after the app was started again: then the store says it. And a policy that ran before is measured."""
    at = settle(say(app(), on=list(ALL)).button(key="run").click().run())
    at = settle(say(at, on=["head"]).button(key="run").click().run())
    assert figures(say(at, on=list(ALL)))["Step peak"] == "104.5 → 34.5 MiB"
    n_runs = len(worker.of(Compare)), len(worker.of(Measure))
    for restarted in (False, True):
        if restarted:
            graph = repository.runs().graph(SPEC)
            streamlit.cache_resource.clear()
            repository.runs().add_graph(SPEC.model, SPEC.device, graph)
        again = app(**link.to_query(SPEC))
        assert figures(again)["Step peak"] == "104.5 → 34.5 MiB"
        assert figures(again)["Gradients"] == "bitwise equal"
        assert (len(worker.of(Compare)), len(worker.of(Measure))) == n_runs


def test_a_run_of_another_machine_is_not_measured_here(app: App, store: Store, tmp_path: Path) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    elsewhere = msgspec.structs.replace(pair.candidate.environment, platform="Plan 9")
    store.save(msgspec.structs.replace(pair, candidate=msgspec.structs.replace(pair.candidate, environment=elsewhere)))
    assert figures(app(**link.to_query(SPEC)))["Gradients"] == "not compared"
    changed = tmp_path / "model.py"
    changed.write_text("# younger than the run\n")
    run = store.list()[0]
    assert repository.is_current(run, f"{changed}:build") is False


def test_a_run_that_could_not_be_saved_says_so_and_stays(app: App, worker: FakeWorker, store: Store) -> None:
    worker.warning = "The run could not be saved: the disk is full."
    at = app()
    assert "the disk is full" in at.warning[0].value
    at = settle(at.button(key="run").click().run())
    assert figures(at)["Gradients"] == "bitwise equal"
    assert "the disk is full" in at.warning[0].value
    assert store.list() == ()
    key = at.session_state["explore"].shown
    assert run_file.read(run_bytes(key)).kind == "comparison"


def test_the_runs_of_a_model_are_points_and_a_click_selects_one(runs_page: App, store: Store) -> None:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamlit, "session_state", {"runs": state})
        reorder(run_id)  # a click on a point
        assert current().order == 1
    at.run()
    assert at.text_input(key=f"name_{run_id}").value == "alone"
    other = msgspec.structs.replace(SPEC, model=ModelRef(target="sample_models/unet.py", size="small"))
    store.save(graphs.compared(graphs.unet(), other), "newest")
    state.select, state.order = run_id, state.order + 1
    assert "gpt.py" in str(at.run().get("plotly_chart")[0].proto), "the model of the selected run is drawn"


def test_any_number_of_runs_stand_side_by_side_and_go_together(runs_page: App, store: Store) -> None:
    for name in ("same", "same", "other"):
        saved(store, name)
    at = runs_page(0, 1, 2)
    rows = {row["figure"]: row for row in at.dataframe[-1].value.to_dict("records")}
    peaks = dict.fromkeys(("other", "same (2)", "same (3)"), "34.5 MiB")
    assert rows["Step peak"] == {"figure": "Step peak", **peaks} and not any("_" in name for name in rows)
    at.button(key="delete_several").click().run()
    assert "They cannot be brought back" in texts(at) and len(store.list()) == 3, "asked first"


def test_a_run_is_noted_and_renamed_and_deleted_after_a_question(runs_page: App, store: Store) -> None:
    run_id = saved(store)
    at = runs_page(0)
    assert at.button(key="rename").disabled
    at.text_input(key=f"note_{run_id}").set_value(" half the time, see the talk ").run()
    at.button(key="save_note").click().run()
    assert [run.note for run in store.list()] == list(at.dataframe[0].value["note"]) == ["half the time, see the talk"]
    assert at.button(key="save_note").disabled, "the row stays selected, and there is nothing left to save"
    at.text_input(key=f"name_{run_id}").set_value("  all recomputed ").run()
    at.button(key="rename").click().run()
    assert [run.name for run in store.list()] == ["all recomputed"]
    at.button(key="delete").click().run()
    assert store.list() and "cannot be brought back" in texts(at), "nothing is deleted before it was confirmed"


def test_ranks_stand_side_by_side_and_each_opens_as_a_run_of_its_own(runs_page: App, store: Store) -> None:
    store.save(kinds.ranks(), "both")
    at = runs_page(0)
    assert [row["rank"] for row in at.dataframe[-1].value.to_dict("records")] == ["0", "1"]
    assert len(at.get("plotly_chart")) == 2
    at.button(key="open").click().run()
    assert at.session_state[repository.OPENED] == ["explore", store.list()[0].run_id], "the fullest rank, all beside it"
    for _ in range(2):  # the second time it is listed already
        at = at.button(key="open_rank").click().run()
        assert not at.exception and at.session_state["switched"] == "explore"
    (alone,) = (run for run in store.list() if run.kind == "measurement")
    assert alone.name == "both, rank 1" and at.session_state[repository.OPENED] == ["explore", alone.run_id]
