"""`pipeline`: one document of a real run, the plan of a policy file, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from explorer.cli import main as cli
from explorer.plan.policy import file as policy_file

pytestmark = pytest.mark.usefixtures("shared")

TINY = "tests/browser/tiny_model.py"


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["pipeline", TINY, "--repeats", "0", "--no-store", *arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.slow
def test_the_plan_of_a_file_runs_again_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "split [two].yaml"

    def read(*arguments: str) -> dict[str, Any]:
        return json.loads(run(*arguments, "--no-predict", "--json").stdout)

    first = read("--stages", "2", "--microbatches", "4", "--policy", "every-2", "--out", str(path))
    assert policy_file.load(str(path)).pipeline is not None
    assert first["n_splitting_equal"] == first["n_gradients"] > 0
    again = read("--policy", str(path), "--schedule", "GPipe")
    asked, plan = first["spec"]["plan"], again["spec"]["plan"]
    assert plan == {**asked, "schedule": "GPipe"} and again["spec"]["policy"] == first["spec"]["policy"]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for option in ("--out", "--save"):
        refused = run(option, str(tmp_path), code=2).stderr
        assert "cannot be written: it is a folder" in refused and "microbatch" not in refused
