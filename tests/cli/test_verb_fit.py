"""The verb fit: the step as it is, ranked levers with their price and gradients, and the lines that switch them on."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from explorer.cli.verbs.fit import _table
from explorer.cli.worker import PartView, _draw
from explorer.record.plan import Progress
from tests import graphs
from tests.cli.asked import read, run
from tests.cli.test_real_worker import spawn
from tests.own_loop.test_first_step import Adam
from tests.ui.fake_worker import FakeJob, fit_of

pytestmark = pytest.mark.usefixtures("shared")

MLP = ("fit", "sample_models/mlp.py", "--set", "batch=64", "--set", "n_layers=4")


@pytest.mark.slow
def test_each_lever_has_its_price_its_gradients_and_its_line() -> None:
    printed = run(*MLP, "--budget", "1100KiB").stdout
    assert "which does not fit in 1.1 MiB" in printed
    for line in (
        "optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0)",
        "model = model.to(torch.bfloat16)",
        'with torch.autocast("cpu", dtype=torch.bfloat16): loss = loss_of(model, batch)',
    ):
        assert f"    {line}\n" in printed
    row = next(line for line in printed.splitlines() if "SGD instead of AdamW" in line)
    assert "+0.0 %" in row and "different" in row
    assert "Judged on two real steps of the same model on this CPU" in printed


def test_the_document_has_every_figure_of_the_rows() -> None:
    document = read(*MLP, "--budget", "1100KiB")
    as_is, rows = document["as_is"], document["rows"]
    assert not as_is["fits"] and document["budget_bytes"] == 1100 * 1024
    assert [row["step"]["fits"] for row in rows] == sorted((row["step"]["fits"] for row in rows), reverse=True)
    for row in rows:
        assert row["saved_bytes"] == as_is["step_peak_bytes"] - row["step"]["step_peak_bytes"] > 0
        assert row["flop_ratio"] == row["step"]["total_flops"] / as_is["total_flops"] and row["script"]


def test_what_is_not_bitwise_can_be_hidden_and_nothing_that_fits_is_exit_1() -> None:
    document = read(*MLP, "--budget", "1100KiB", "--bitwise", code=1)
    assert not document["combinations"]
    assert all(row["judgement"]["effect"] == "bitwise" for row in document["rows"])


def test_a_card_adds_what_is_reserved() -> None:
    printed = run(*MLP, "--card", "24GiB").stdout
    assert "reserved, which fits in a card of 24.00 GiB" in printed
    as_is = read(*MLP, "--card", "24GiB", "--steps", "3")["as_is"]
    assert as_is["spec"]["card"]["n_steps"] == 3
    assert 0 < as_is["allocated_bytes"] <= as_is["reserved_bytes"]
    assert "no GPU is named" in run(*MLP, "--steps", "3", code=2).stderr


def test_a_share_is_one_of_the_peak_and_another_budget_is_one_sentence(tiny: str) -> None:
    document = read("fit", tiny, "--budget", "99%")
    assert document["budget_bytes"] == int(0.99 * document["as_is"]["step_peak_bytes"])
    for budget in ("+10% time", "60%, +10% time", "device", "card", "60"):
        said = " ".join(run("fit", tiny, "--budget", budget, code=2).stderr.split())
        assert "Traceback" not in said and ("70%" in said or "60 bytes" in said)
    assert "Traceback" not in run("fit", "no_such_file.py", code=2).stderr


def test_a_step_that_is_fused_already_is_played_as_it_is() -> None:
    document = read(*MLP, "--optimizer-form", "fused")
    assert document["as_is"]["spec"]["optimizer_form"] == document["judged_on"]["optimizer_form"] == "fused"
    offered = {key for row in document["rows"] for key in row["levers"]}
    assert not offered & {"foreach", "fused"}


def test_a_recorded_step_is_answered_from_its_file(tmp_path: Path) -> None:
    file = Adam().recorded().save(tmp_path / "step.explorer")
    document = read("fit", str(file), "--budget", "1KiB", code=1)
    assert document["rows"] and not any(row["step"]["fits"] for row in document["rows"])
    assert "not run again" in run("fit", str(file), "--card", "h100").stdout


UNDER_AUTOCAST = """
import os, time
import torch
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            if not os.environ.get("STARTED"):
                os._exit(7)
            open(os.environ["STARTED"], "w").close()
            time.sleep(60)
        return super().forward(x)


def build():
    return Net(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 64)
"""
PLAYED = ("SGD instead of AdamW", "AdamW with moments in 8 bits")
"""Levers that are played before autocast and save bytes."""
LACKS = "Missing   The fit was cut off (levers not played: 7, rows not judged: 5, combinations not all tried)."


@pytest.fixture
def stops(tmp_path: Path) -> str:
    """A model that hangs, or ends its process, when the lever of autocast is played."""
    (tmp_path / "stops.py").write_text(UNDER_AUTOCAST)
    return f"{tmp_path}/stops.py:build"


@pytest.mark.slow
def test_rows_are_printed_where_a_fit_ends_early(stops: str) -> None:
    """As at the time limit: the job fails, and the rows that are there are the answer."""
    process = spawn("fit", stops, "--budget", "50%")
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and "exit code 7" in stderr
    assert all(title in stdout for title in PLAYED) and LACKS in stdout
    assert "bfloat16" not in stdout and "Judged on" not in stdout
    document, _ = spawn("fit", stops, "--budget", "50%", "--json").communicate(timeout=200)
    assert set(json.loads(document)) == {"failure"}


@pytest.mark.slow
def test_ctrl_c_prints_the_rows_that_are_there(stops: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = spawn("fit", stops, "--budget", "50%", STARTED=str(started))
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and "Cancelled." in stderr and "Traceback" not in stderr
    assert all(title in stdout for title in PLAYED) and LACKS in stdout


def test_a_terminal_shows_the_rows_of_a_part_above_the_progress() -> None:
    class Job(FakeJob):
        n_looks = 0

        def wait(self, timeout_s: float | None = None) -> bool:
            self.n_looks += 1
            return self.n_looks > 2

    job = Job("job", None)
    job.progress = Progress(what="judging a row", done=0, total=0)
    job.part = fit_of(graphs.measured(graphs.GRAPH, graphs.SPEC), None)
    terminal = io.StringIO()
    _draw(job, Console(file=terminal, force_terminal=True, width=120), PartView(_table, lambda part: None))
    drawn = terminal.getvalue()
    assert drawn.index("SGD instead of AdamW") < drawn.index("judging a row")
