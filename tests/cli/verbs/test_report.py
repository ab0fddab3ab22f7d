"""`report`: a run file or a stored run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from explorer.cli import main as cli
from explorer.jobs import run_file
from explorer.jobs.store import Store
from explorer.record import Comparison, Measurement
from explorer.record.base import from_msgpack
from tests import graphs
from tests.view.report.kinds import pipelined

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"


@pytest.fixture
def measured() -> Measurement:
    """A run that brings its graph, as a recorded step does: no model is loaded for its hazards."""
    pair = from_msgpack(GOLDEN.read_bytes(), Comparison)
    return replace(pair.candidate, graph=graphs.gpt(4))


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["report", *arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_a_stored_run_and_a_run_file_give_the_same_report(tmp_path: Path, measured: Measurement) -> None:
    run_id = Store().save(measured, "my run")
    file = tmp_path / "my.run"
    file.write_bytes(Store().export_file(run_id))
    for which, name in ((run_id, "a.html"), (str(file), "b.html")):
        run(which, "--out", str(tmp_path / name))
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert "<h1>my run</h1>" in text and "<h2>Hazards</h2>" in text


def test_without_a_run_the_stored_ones_are_listed(measured: Measurement) -> None:
    assert "No run is stored yet" in run().stdout
    run_id = Store().save(measured, "my run")
    assert run_id in run().stdout and "my run" in run().stdout


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path, measured: Measurement) -> None:
    run_id = Store().save(measured)
    assert "A report needs a place." in run(run_id, code=2).stderr
    assert "There is no run nonsense" in run("nonsense", "--out", str(tmp_path / "r.html"), code=2).stderr
    assert "cannot be written" in run(run_id, "--out", str(tmp_path), code=2).stderr


def test_every_kind_of_run_is_listed_and_reported(tmp_path: Path, measured: Measurement) -> None:
    sections = {"<h2>Schedule</h2>": Store().save(pipelined()), "<h2>Memory</h2>": Store().save(measured, "my run [2]")}
    listed = run().stdout
    assert "my run [2]" in listed
    for section, run_id in sections.items():
        assert run_id in listed
        run(run_id, "--out", str(tmp_path / "r.html"))
        assert section in (tmp_path / "r.html").read_text()


def path_of_rank(run: Measurement, rank: int, n_ranks: int = 2, step: int = 2) -> bytes:
    recorded = replace(
        run, origin="recorded", rank=rank, n_ranks=n_ranks, recorded_in=f"train.py, step {step}, rank {rank}"
    )
    return run_file.write(run_file.stored_record(recorded))


def test_the_files_that_ranks_wrote_are_one_report_by_their_common_name(tmp_path: Path, measured: Measurement) -> None:
    for rank in (0, 1):
        (tmp_path / f"step2.rank{rank}.explorer").write_bytes(path_of_rank(measured, rank))
    run(str(tmp_path / "step2.explorer"), "--out", str(tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text()
    assert "<h1>train.py, step 2, 2 of 2 ranks</h1>" in text and "<h2>Ranks</h2>" in text
    run(str(tmp_path / "step2.rank1.explorer"), "--out", str(tmp_path / "r.html"))
    assert "<h2>Ranks</h2>" not in (tmp_path / "r.html").read_text()
    (tmp_path / "step2.rank1.explorer").write_bytes(path_of_rank(measured, 1, n_ranks=4, step=3))
    refused = run(str(tmp_path / "step2.explorer"), "--out", str(tmp_path / "r.html"), code=2).stderr
    sentence = (
        "they are of trainings with 2 and 4 ranks; they were recorded in train.py, step 2 and in train.py, step 3"
    )
    assert sentence in " ".join(refused.split())
