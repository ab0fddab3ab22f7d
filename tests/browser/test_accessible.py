"""What everybody has to be able to read and reach: contrast in both themes, names of all controls."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.contrast import too_faint
from tests.browser.measured import compared, measured
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONTROLS = {
    "button", "checkbox", "combobox", "link", "menuitem", "radio", "searchbox", "slider", "spinbutton", "switch", "tab",
    "textbox", "treeitem",
}  # fmt: skip


def without_a_name(page: Page) -> list[str]:
    """Controls that a screen reader cannot tell: no name, a glyph, or the name of an icon."""
    session = page.context.new_cdp_session(settled(page))
    tree = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()  # else each later change of the page updates the tree
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored") and node["role"]["value"] in CONTROLS
    ]
    assert len(named) > 3, "the page has no controls"
    return [f"{role} {name!r}" for role, name in named if not re.search(r"\w", name) or name.endswith(" icon")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_on_every_page_reads_and_every_control_has_a_name(page: Page, app: Served, theme: str) -> None:
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    measured(page, app.url)
    faint: dict[str, list[str]] = {}
    nameless: dict[str, list[str]] = {}

    def look(place: str) -> None:
        faint[place], nameless[place] = too_faint(page), without_a_name(page) if theme == "light" else []

    look("before a run")
    compared(page)
    for tab in ("Cost", "Gradients", "Autograd", "Memory"):
        press(page, page.get_by_role("tab", name=tab))
        look(tab)
    for menu in ("Presets", "Options", "Policy file", "Run file"):
        press(page, page.get_by_role("button", name=menu))
        look(menu)
        page.keyboard.press("Escape")
    page.locator('[data-id="layers"]').get_by_role("button", name="Keep all").click()
    page.locator('[data-id="head"]').click()
    look("for the previous policy")
    for link in ("Pipeline", "Lab", "Runs"):
        press(page, page.get_by_role("link", name=link))
        page.get_by_role("button").first.wait_for()
        look(link)
    assert {place: words for place, words in faint.items() if words} == {}
    assert {place: names for place, names in nameless.items() if names} == {}
