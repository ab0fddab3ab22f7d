"""Every page has a name and an address of its own, the first one being where a visit begins."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.testing.v1 import AppTest


def test_the_pages(app: Callable[..., AppTest]) -> None:
    pages = app().session_state["pages"]
    assert list(pages) == ["explore", "pipeline", "lab", "runs"]
    assert [page.title for page in pages.values()] == ["Explore", "Pipeline", "Lab", "Runs"]
    assert [page.url_path for page in pages.values()] == ["", "pipeline", "lab", "runs"]
