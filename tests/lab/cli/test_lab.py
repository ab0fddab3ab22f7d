"""The verb `lab`, and the lessons of the gallery."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.lab import plan
from explorer.lab.cli import gallery
from explorer.lab.engine import lessons as folder
from explorer.lab.jobs import RunLab
from explorer.lab.record import LabOutcome
from tests.cli.asked import read, run
from tests.cli.conftest import engine, shared  # noqa: F401  fixtures
from tests.lab.added import with_one_more
from tests.lab.view.test_outcome import outcome


@pytest.mark.usefixtures("shared")
def test_a_lesson_added_as_a_file_is_listed_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LESSONS", with_one_more(tmp_path))
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    outcome = read("lab", "one-more", "--set", "which=that")
    assert outcome["findings"] == ["It ran with that."] and outcome["switches"] == {"which": "that"}
    assert outcome["rows"][1]["outcome"] == "bitwise equal"
    listed = run("lab").stdout
    assert "one-more" in listed and "Can a lesson be added as a file?" in listed
    sys.modules.pop("explorer.lab.engine.lessons.one_more")


def test_every_lesson_is_run_for_its_page_of_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: object, request: RunLab) -> LabOutcome:
        switches = {switch.name: switch.default for switch in plan.lesson_called(request.name).switches}
        return replace(outcome(), switches=switches)

    monkeypatch.setattr(gallery, "ask", ask)
    exhibits = list(gallery.exhibits(None, tmp_path))  # type: ignore[arg-type]
    assert [exhibit.title for exhibit in exhibits] == [lesson.title for lesson in plan.lessons()]
    assert {exhibit.file for exhibit in exhibits} == {path.name for path in tmp_path.iterdir()}
