"""The list of runs: open, rename, pin, delete, carry elsewhere; a file that is no run is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import streamlit
from streamlit.testing.v1 import AppTest

from explorer.jobs import run_file
from explorer.jobs.protocol import Compare, Measure
from explorer.jobs.store import Store
from explorer.ui.session import address as link
from explorer.ui.session import backend, known
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, say, settle, texts
from tests.ui.runs.listing import ALL, SPEC, saved
from tests.view import reports as kinds


def test_an_empty_store_says_how_to_fill_it(runs_page: Callable[..., AppTest]) -> None:
    assert "No run yet" in texts(runs_page())


def test_every_run_is_listed_with_its_figures(runs_page: Callable[..., AppTest], store: Store) -> None:
    saved(store)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["name"] == "mine"
    assert row["step peak"] == "104.5 MiB → 34.5 MiB"
    assert row["gradients"] == "bitwise equal"


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
    store.rename(run.run_id, "by another name")
    again = runs_page()
    again.file_uploader(key="upload_run").upload("copy.run", data)
    again.run()
    assert "already here" in again.success[0].value
    assert [one.name for one in store.list()] == ["by another name"], "content decides, not the name"


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


def test_a_store_that_cannot_be_read_is_one_sentence(runs_page: Callable[..., AppTest], store: Store) -> None:
    Path(store.path).write_bytes(b"no database")
    at = runs_page()
    assert len(at.error) == 1


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
