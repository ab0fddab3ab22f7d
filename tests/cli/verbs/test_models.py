"""What can be loaded is listed."""

from __future__ import annotations

from pathlib import Path

from tests.cli.asked import read, run


def test_models(root: Path) -> None:
    listed = {sample["target"] for sample in read("models")}
    assert listed == {f"sample_models/{path.name}" for path in (root / "sample_models").glob("[!_]*.py")}
    assert "sample_models/gpt.py" in run("models").stdout
