"""A file made on a press outlives the reruns of the page that offered it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from streamlit import runtime
from streamlit.runtime.media_file_manager import MediaFileManager
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.testing.v1 import AppTest

from explorer.ui.shared import download

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


def test_streamlit_itself_drops_a_file_after_two_reruns(files: MediaFileManager) -> None:
    name = pressed(files, lambda: TEXT)
    assert files.read_file(name) is not None
    reruns(files)
    assert files.read_file(name) is None


def test_a_file_is_held_until_so_many_others_were_made(files: MediaFileManager) -> None:
    name = pressed(files, lambda: download._held(TEXT, MIME, NAME))
    reruns(files)
    kept = files.read_file(name)
    assert kept is not None and kept.content == TEXT.encode() and kept.filename == NAME
    for n in range(download.N_HELD):
        pressed(files, lambda n=n: download._held(f"{TEXT} # {n}", MIME, NAME))
    reruns(files)
    assert files.read_file(name) is None


def test_a_button_offers_text_and_functions() -> None:
    def script() -> None:
        from explorer.ui.shared.download import Offer, download

        download(Offer("Text", "a.csv", "a,b"), key="text")
        download(Offer("Made", "b.zip", lambda: b"PK"), key="made")

    at = AppTest.from_function(script).run()
    assert not at.exception and [one.proto.label for one in at.get("download_button")] == ["Text", "Made"]
