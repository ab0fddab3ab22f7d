"""Small elements: escaped text, folds, the strip, hazards, failures; charts as files; downloads and reports."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import streamlit as st
from streamlit import runtime
from streamlit.runtime.media_file_manager import MediaFileManager
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.ui.shared import download
from explorer.ui.shared.charts import as_csv
from explorer.ui.shared.download import report_bytes
from explorer.ui.shared.elements import ON_PRIMARY, TITLES, escape, on_primary
from tests.ui.page_driver import ROOT, App, saved, select
from tests.view import reports as kinds


@pytest.mark.parametrize("text", ["**b** [x](http://e)", "<img src=x>", ":red[x] $y$", "`code` a_b_c", "\\"])
def test_no_markup_survives(text: str) -> None:
    escaped = escape(text)
    for i, character in enumerate(escaped):
        if character in "*[]<>$`_":
            assert escaped[i - 1] == "\\"
    lines = as_csv([{"name": "=cmd()", "n": -1}, {"name": "plain", "more": 2}]).splitlines()
    assert lines == ["name,n,more", "'=cmd(),-1,", "plain,,2"], "a spreadsheet takes no cell for a formula"


def test_a_rerun_ends_without_a_full_collection_and_presses_wait_in_one_queue() -> None:
    """A collection cost a page that waits 0.3 CPU seconds a second. Streamlit must know both options."""
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["runner"] == {"postScriptGC": False, "fastReruns": False}
    assert all(isinstance(st.config.get_option(f"runner.{name}"), bool) for name in config["runner"])


@pytest.mark.parametrize(
    ("theme", "disabled", "coloured"), [("dark", False, True), ("dark", True, False), ("light", False, False)]
)
def test_words_on_the_primary_colour_are_dark_in_the_dark_theme_alone(
    theme: str, disabled: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(st, "context", SimpleNamespace(theme=SimpleNamespace(type=theme)))
    assert (ON_PRIMARY in on_primary("Run", disabled=disabled)) == coloured
    assert "Run" in on_primary("Run", disabled=disabled)


def folds() -> None:
    import streamlit as st

    from explorer.ui.shared.elements import fold

    if st.session_state.get("tab", "first") == "first":
        st.session_state["stands"] = fold("Why", key="why").open
        st.session_state["other"] = fold("Known", key="known", expanded=True).open


def test_an_expander_stays_as_it_was_left() -> None:
    at = AppTest.from_function(folds).run()
    assert (at.session_state["stands"], at.session_state["other"]) == (False, True)
    at.session_state["folds"]["why"] = True  # what the callback notes
    at.session_state["tab"] = "second"
    at.run()
    at.session_state["tab"] = "first"
    at.run()
    assert not at.exception
    assert (at.session_state["stands"], at.session_state["other"]) == (True, True)


def hazards() -> None:
    import streamlit as st

    from explorer.record import Hazard
    from explorer.ui.shared.elements import hazards_panel

    wrong = Hazard(rule="r", severity="error", blocks=("a", "b"), sentence="It *breaks*.", remedy="Do not.")
    note = Hazard(rule="s", severity="note", blocks=(), sentence="By the way.", remedy="Nothing.")
    hazards_panel((wrong, note) if st.session_state.get("any", True) else ())


def test_hazards_have_severity_sentence_remedy_and_blocks_and_none_is_said() -> None:
    at = AppTest.from_function(hazards).run()
    assert not at.exception
    assert [text.value for text in at.text] == [
        "It *breaks*.\nRemedy: Do not.\nBlocks: a, b",
        "By the way.\nRemedy: Nothing.\nBlocks: all",
    ]
    badges = " ".join(markdown.value for markdown in at.markdown)
    assert "red-badge[error]" in badges and "gray-badge[note]" in badges
    at.session_state["any"] = False
    assert [caption.value for caption in at.run().caption] == ["No known hazard in this policy on this model."]


def failures() -> None:
    import streamlit as st

    from explorer.record.failure import Failure
    from explorer.ui.shared.elements import TITLES, failure_panel

    for i, kind in enumerate(TITLES):
        failure = Failure(kind=kind, sentence=f"<b>**{kind}**</b>", hint="Take less.", traceback="line 1")
        failure_panel(failure, key=str(i), close=lambda kind=kind: st.session_state.update(closed=kind))


def test_every_kind_of_failure_has_a_title_and_can_be_closed() -> None:
    at = AppTest.from_function(failures).run()
    assert not at.exception
    assert [title for title in TITLES.values() if title not in "".join(one.value for one in at.markdown)] == []
    assert [text.value for text in at.text][::2] == [f"<b>**{kind}**</b>" for kind in TITLES]
    assert len(at.code) == len(TITLES) - 1, "who cancels needs no traceback"
    at.button(key="close_2").click().run()
    assert at.session_state["closed"] == "out of memory"


TEXT, NAME, MIME = "units: []", "policy.yaml", "application/yaml"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> MediaFileManager:
    manager = MediaFileManager(MemoryMediaFileStorage("/media"))
    monkeypatch.setattr(runtime, "exists", lambda: True)
    monkeypatch.setattr(runtime, "get_instance", lambda: SimpleNamespace(media_file_mgr=manager))
    return manager


def pressed(files: MediaFileManager, make: Callable[[], str | bytes]) -> str:
    """What the browser is told to fetch."""
    placeholder = files.add_deferred(make, MIME, "button", file_name=NAME)
    return files.execute_deferred(placeholder).rpartition("/")[2].partition(".")[0]


def reruns(files: MediaFileManager) -> None:
    for _ in range(3):
        files.remove_orphaned_files()


def test_a_file_is_held_until_so_many_others_were_made(files: MediaFileManager) -> None:
    name = pressed(files, lambda: download._stored(TEXT, MIME, NAME))
    reruns(files)
    kept = files.read_file(name)
    assert kept is not None and kept.content == TEXT.encode() and kept.filename == NAME
    for n in range(download.N_FILES):
        pressed(files, lambda n=n: download._stored(f"{TEXT} # {n}", MIME, NAME))
    reruns(files)
    assert files.read_file(name) is None


def test_every_kind_of_run_has_a_report_in_the_list(runs_page: App, store: Store) -> None:
    for kind, record in kinds.KINDS.items():
        run_id = store.save(record, "mine")
        assert "Report" in [button.label for button in runs_page(0).get("download_button")], kind
        assert "<h1>mine</h1>" in report_bytes(run_id).decode()
    run_id = saved(store)
    offered = ["Export", "Report", *(label for label, _ in download.TRACES.values())]
    assert [button.label for button in select(runs_page(), 0).get("download_button")] == offered
    assert "104.5 → 34.5 MiB" in report_bytes(run_id).decode()
