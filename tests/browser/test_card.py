"""The way of a person whose card refuses: a card, toggles, and figures that the command line says too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.engine.bench import measure
from explorer.record.base import from_plain
from explorer.record.card import CardMemory
from explorer.view.drawing.units import mib
from explorer.view.memory.card import card_answer
from tests.browser.served import Served
from tests.browser.settled import press, settled
from tests.cli.asked import read
from tests.cli.conftest import InThisProcess, call_here, give

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and what they call run in this process: another one would import torch for seconds."""
    monkeypatch.setattr(measure, "call_in_subprocess", call_here)
    give(monkeypatch, InThisProcess(tmp_path / "runs.sqlite"))


def said_by_the_command_line(model: str, card: str) -> dict[str, CardMemory]:
    """What the card holds with everything kept and with everything recomputed."""
    sides = read("compare", model, "--predict", "--card", card, "--policy", "all")
    return {name: from_plain(sides[name]["card"], CardMemory) for name in ("baseline", "candidate")}


def choose(page: Page, label: str, text: str) -> None:
    """Types one of the options of the step."""
    box = page.get_by_role("combobox", name=label)
    if not box.is_visible():
        press(page, page.locator(".st-key-options button").first)
    box.fill(text)
    box.press("Enter")
    settled(page)
    page.keyboard.press("Escape")


@pytest.mark.usefixtures("command_line")
def test_a_card_follows_each_toggle_with_the_figures_of_the_command_line(page: Page, app: Served, tiny: str) -> None:
    model = tiny.replace(":build", ":large")
    page.goto(f"{app.url}/?model={model}&predict=1")
    page.get_by_role("treeitem").first.wait_for()
    choose(page, "predict for", "b200")
    sides = said_by_the_command_line(model, "b200")
    assert sides["baseline"].workspace_bytes == 2 * (32 << 20), "tests/conftest.py sets CUBLAS_WORKSPACE_CONFIG"
    page.get_by_text(card_answer({"baseline": sides["baseline"]})).first.wait_for()
    page.get_by_text("can be reserved, above this picture").first.wait_for()

    press(page, page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all"))
    drawn = {"baseline": sides["baseline"], "drawn policy": sides["candidate"]}
    page.get_by_text(card_answer(drawn)).first.wait_for()
    assert sides["candidate"].reserved_bytes < sides["baseline"].reserved_bytes

    choose(page, "allocator", "expandable_segments:True")
    page.get_by_text("by torch's rules, against no recorded history").first.wait_for()

    room = sides["candidate"].reserved_bytes + (820 << 20)
    assert room < sides["baseline"].reserved_bytes + (800 << 20)
    choose(page, "predict for", f"{room >> 20} MiB")
    place = page.get_by_text(f"baseline refused {mib(16 << 20)} in layers.").first
    place.wait_for()
