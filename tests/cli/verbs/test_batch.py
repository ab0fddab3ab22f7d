"""The largest batch that fits is predicted from two small runs, and a run confirms it to the byte."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from explorer.cli import main as cli

pytestmark = pytest.mark.usefixtures("shared")


@pytest.mark.slow
def test_the_largest_batch_under_a_policy() -> None:
    asked = ["batch", "sample_models/mlp.py", "--budget", "8MiB", "--policy", "all", "--repeats", "0", "--json"]
    answer = CliRunner().invoke(cli.app, asked)
    assert answer.exit_code == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["event_by_event"]
    assert figures["predicted_peak_bytes"] == figures["step_peak_bytes"] <= figures["budget_bytes"]
    per_batch = figures["step_peak_bytes"] / figures["largest"]
    assert figures["budget_bytes"] - figures["step_peak_bytes"] < per_batch


@pytest.mark.slow
def test_a_budget_below_a_batch_of_one_says_what_that_needs() -> None:
    answer = CliRunner().invoke(cli.app, ["batch", "sample_models/mlp.py", "--budget", "1MiB", "--repeats", "0"])
    assert answer.exit_code == 2
    assert "Not even a batch of 1 fits in 1.0 MiB: it needs" in answer.stderr and "(predicted)" in answer.stderr
