"""What leaves the page comes back: policy file, run file and pictures, through a real browser's downloads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from msgspec.structs import replace

from explorer.jobs.store import Store
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy.file import load
from explorer.record import Policy, Unit
from explorer.ui.session.address import from_query
from explorer.view.drawing.units import mib
from explorer.view.report.report import ReportOf, report_text
from tests.browser.forecasts_in_page import bundled
from tests.browser.measured import ANSWERED, confirm_marks, measured
from tests.browser.served import Served
from tests.browser.settled import press, settled
from tests.cli.asked import read
from tests.cli.conftest import InThisProcess, give

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def downloaded(page: Page, button: Locator, folder: Path) -> Path:
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_policy_run_and_picture_leave_and_come_back(page: Page, app: Served, tmp_path: Path) -> None:
    measured(page, app.url)
    head = page.locator('[data-id="head"]')
    head.click()
    confirm_marks(page, re.compile(r"^0 of 4 blocks and 1 more$"))
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text(ANSWERED).wait_for()

    press(page, page.get_by_role("button", name="Policy file"))
    policy = downloaded(page, page.get_by_role("button", name="Download (YAML)"), tmp_path)
    saved = load(policy)
    assert saved.policy.blocks == ("head",) and saved.evidence is not None
    assert saved.evidence.verdict == "bitwise equal"
    for title, target in ((FORMATS[target].title, target) for target in ("torch", "fsdp2")):
        choice = page.get_by_role("combobox", name=re.compile("For another program"))
        choice.fill(title)
        choice.press("Enter")
        text = downloaded(page, page.get_by_role("button", name=f"For {title}"), tmp_path).read_text()
        assert text == exported(saved, target).text, "what the command line writes, which tests/cli runs"
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
    page: Page, app: Served, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(page, app.url)
    chosen = tmp_path / "chosen.yaml"
    chosen.write_text("version: 1\npolicy:\n  units: [layers.1, layers.2, layers.3, head]\n")  # no other test runs it
    assert app.home is not None
    monkeypatch.setenv("CHECKPOINT_EXPLORER_HOME", str(app.home))
    give(monkeypatch, InThisProcess(Store().path))
    peak = read("compare", tiny, "--policy", str(chosen))["candidate"]["step_peak_bytes"]
    page.locator('[data-id="head"]').click()
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    page.locator('[data-id="layers"] .cell').first.click()
    confirm_marks(page, re.compile(r"^3 of 4 blocks and 1 more$"))
    page.get_by_text(ANSWERED).wait_for()
    page.locator(".figure .value").first.get_by_text(f"{peak / 2**20:.1f}").wait_for()


def test_a_page_without_a_server_opens_the_app_with_its_policy(
    page: Page, from_disk: Callable[[Path], Page], app: Served, tmp_path: Path
) -> None:
    """The app runs on a port of its own here; the page names the port of `make app`."""
    recorded, file = bundled("tied_lm"), tmp_path / "tied_lm.html"
    file.write_text(report_text(ReportOf(run=recorded.run, name="tied_lm", plans=recorded.front.plans)))
    report = from_disk(file)
    report.get_by_role("button", name="Segments of √n blocks").click()
    policy = Policy(units=tuple(Unit(blocks=tuple(unit["blocks"])) for unit in report.evaluate("page.policy")))
    assert any(len(unit.blocks) > 1 for unit in policy.units)
    peak = mib(report.evaluate("page.answer.peak"))
    assert report.evaluate("facts.address.app") == "http://localhost:8501/"
    report.evaluate("app => { facts.address.app = `${app}/` }", app.url)
    with report.context.expect_event("request", lambda request: request.url.startswith(app.url)) as opening:
        report.get_by_role("button", name="Open in the app").click()
    address = opening.value.url
    assert from_query(dict(parse_qsl(urlsplit(address).query))) == replace(recorded.run.spec, policy=policy)
    page.goto(address)  # the browser without network only asks for it
    page.get_by_text(re.compile(f"Segments of √n blocks: .* ≈ {re.escape(peak)} ")).wait_for()
    page.locator('[data-id="blocks"][aria-checked="true"]').get_by_text("8 of 8").wait_for()
