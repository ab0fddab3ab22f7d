"""What can be done with selected runs: rename, pin, note, delete, carry away, hold side by side."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.record.base import to_plain
from tests.ui.page_driver import texts
from tests.ui.runs.listing import SPEC, saved, select


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
