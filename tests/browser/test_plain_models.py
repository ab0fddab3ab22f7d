"""The plainest models on the real page: all tabs are drawn, the guided path begins, and nothing raises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.ui.explore.results import TABS
from explorer.view.words.tour import STEPS
from tests.browser.measured import APP
from tests.browser.settled import press, settled
from tests.browser.served import HERE, Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

FACTORIES = re.findall(r"^def (\w+)\(\):", (HERE / "plain_models.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def plain(serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Address of each model on one server that offers all of them."""
    file = shutil.copy(HERE / "plain_models.py", tmp_path_factory.mktemp("models"))
    app = serve(APP, *(f"--model={file}:{name}" for name in FACTORIES))
    return {name: f"{app.url}/?model={file}:{name}" for name in FACTORIES}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_plain_model_has_all_tabs_and_the_first_steps_of_the_guided_path(
    page: Page, plain: dict[str, str], name: str
) -> None:
    def whole() -> None:
        assert settled(page).get_by_test_id("stException").count() == 0
        assert page.get_by_role("tab").all_inner_texts() == TABS

    page.goto(plain[name])
    page.get_by_text("Measured with everything kept.").wait_for()
    whole()
    press(page, page.get_by_role("button", name="Show me"))
    for step in STEPS[:3]:
        page.get_by_text(step.title, exact=True).wait_for()
        whole()
        press(page, page.get_by_role("button", name=re.compile("Next|Skip this step")))
    for tab in TABS:
        press(page, page.get_by_role("tab", name=tab, exact=True))
        whole()
