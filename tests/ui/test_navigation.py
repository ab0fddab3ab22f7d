"""Every page has a name and an address of its own, the first one being where a visit begins."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.commands.page_config import _get_favicon_string
from streamlit.testing.v1 import AppTest

from explorer.ui.navigation import TAB_ICON


def test_the_pages(app: Callable[..., AppTest]) -> None:
    pages = app().session_state["pages"]
    assert list(pages) == ["explore", "pipeline", "lab", "runs"]
    assert [page.title for page in pages.values()] == ["Explore", "Pipeline", "Lab", "Runs"]
    assert [page.url_path for page in pages.values()] == ["", "pipeline", "lab", "runs"]


def test_the_picture_of_the_tab_comes_with_the_page_and_from_nowhere_else() -> None:
    assert _get_favicon_string(TAB_ICON).startswith("data:image/svg+xml")
