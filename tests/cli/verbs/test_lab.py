"""A lesson added as a file, in a copy of the package: listed and run by the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.added import ONE_MORE


@pytest.mark.slow
def test_a_lesson_added_as_a_file_is_listed_and_runs(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "explorer", tmp_path / "explorer", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "explorer" / "lab" / "one_more.py").write_text(ONE_MORE)

    def lab(*arguments: str) -> str:
        command = [sys.executable, "-m", "explorer", "lab", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "one-more" in lab() and "Can a lesson be added as a file?" in lab()
    outcome = json.loads(lab("one-more", "--set", "which=that", "--json"))
    assert outcome["findings"] == ["It ran with that."] and outcome["switches"] == {"which": "that"}
    assert outcome["rows"][1]["outcome"] == "bitwise equal"
