"""What leaves the page comes back: policy file, run file and pictures, through a real browser's downloads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.jobs.store import Store
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy.file import load
from tests.browser.measured import ANSWERED
from tests.browser.served import Served
from tests.browser.settled import press, settled
from tests.cli.asked import read
from tests.cli.conftest import InThisProcess, give

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@pytest.fixture
def measured(page: Page, app: Served) -> Page:
    """The page once a policy with one block was run."""
    page.goto(app.url)
    page.get_by_text("Measured with everything kept.").wait_for()
    page.locator('[data-id="head"]').click()
    page.locator(".figure .value").get_by_text(re.compile(r"^1 (of \d+ )?blocks?$")).wait_for()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text(ANSWERED).wait_for()
    return settled(page)


def downloaded(page: Page, button: Locator, folder: Path) -> Path:
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_policy_run_and_picture_leave_and_come_back(measured: Page, tmp_path: Path) -> None:
    page = measured
    head = page.locator('[data-id="head"]')

    press(page, page.get_by_role("button", name="Policy file"))
    policy = downloaded(page, page.get_by_role("button", name="Policy with evidence"), tmp_path)
    for title, target in ((FORMATS[target].title, target) for target in ("torch", "lightning")):
        choice = page.get_by_role("combobox", name=re.compile("For another program"))
        choice.fill(title)
        choice.press("Enter")
        text = downloaded(page, page.get_by_role("button", name=f"For {title}"), tmp_path).read_text()
        assert text == exported(load(policy), target).text, "what the command line writes, which tests/cli runs"
    page.keyboard.press("Escape")
    press(page, page.get_by_role("button", name="undo", exact=False))
    page.locator('[data-id="head"][aria-checked="false"]').wait_for()
    press(page, page.get_by_role("button", name="Policy file"))
    page.locator(".st-key-upload_policy input[type=file]").set_input_files(policy)
    page.locator('[data-id="head"][aria-checked="true"]').wait_for()
    page.keyboard.press("Escape")
    page.get_by_text(ANSWERED).wait_for()
    press(page, head)
    page.locator('[data-id="head"][aria-checked="false"]').wait_for()  # the file does not come back by itself

    chart = settled(page).get_by_test_id("stPlotlyChart").first
    chart.hover()
    picture = downloaded(page, chart.locator('[data-title^="Download plot"]'), tmp_path)
    assert picture.suffix == ".svg"
    assert ">candidate<" in picture.read_text()

    press(page, page.get_by_role("button", name="Run file"))
    run = downloaded(page, page.get_by_role("button", name="This run"), tmp_path)
    page.keyboard.press("Escape")
    press(page, page.get_by_role("link", name="Runs"))
    page.get_by_text("Select a row to open").wait_for()
    press(page, page.get_by_text("Open a run file"))
    page.locator(".st-key-upload_run input[type=file]").set_input_files(run)
    page.get_by_text("already here").wait_for()  # the same run is in the store
    settled(page).get_by_test_id("stDataFrame").click(position={"x": 16, "y": 50})
    press(page, page.locator(".st-key-open").get_by_role("button"))
    page.get_by_text(ANSWERED).wait_for()
    page.locator('[data-id="head"][aria-checked="true"]').wait_for()


def test_an_open_page_finds_what_the_command_line_measures(
    measured: Page, app: Served, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "five.yaml"
    chosen.write_text("version: 1\npolicy:\n  units: [layers.0, layers.1, layers.2, layers.3, head]\n")
    assert app.home is not None
    monkeypatch.setenv("CHECKPOINT_EXPLORER_HOME", str(app.home))
    give(monkeypatch, InThisProcess(Store().path))
    peak = read("compare", tiny, "--policy", str(chosen))["candidate"]["step_peak_bytes"]
    measured.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    measured.locator(".figure .value").get_by_text(re.compile(r"^5 (of \d+ )?blocks?$")).wait_for()
    measured.get_by_text(ANSWERED).wait_for()
    assert f"{peak / 2**20:.1f}" in measured.locator(".figure .value").first.inner_text()
