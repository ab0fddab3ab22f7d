"""`arena`: one document with every bout, a table that says the same, and an exit code for a planner that was beaten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from explorer.cli import main as cli
from explorer.cli.verbs.arena import print_arena
from explorer.jobs import run_file
from explorer.record.arena import Arena
from explorer.record.base import from_msgpack

pytestmark = pytest.mark.usefixtures("shared")

GPT = ["arena", "sample_models/gpt.py", *["--set", "n_layers=3", "--set", "length=64", "--repeats", "2"]]


@pytest.mark.slow
def test_the_document_the_file_and_the_table_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "arena.run"
    asked = ["--budgets", "0.8", "--only", "recompute-all,explorer,ckptplan", "--no-store", "--save", str(saved)]
    result = CliRunner().invoke(cli.app, [*GPT, *asked, "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == (1 if document["beaten"] else 0), result.stderr
    ours, everything, stranger = (
        next(bout for bout in document["bouts"] if bout["rival"] == name)
        for name in ("explorer", "recompute-all", "ckptplan")
    )
    assert ours["fits"] and ours["verdict"] == everything["verdict"] == "bitwise equal"
    assert ours["step_peak_bytes"] <= ours["budget_bytes"] < document["ground"]["peak_bytes"]
    assert everything["share"] is None and not stranger["ran"] and "CUDA" in stranger["why"]

    arena = from_msgpack(run_file.read(saved.read_bytes()).record, Arena)
    assert [bout.rival for bout in arena.bouts] == [bout["rival"] for bout in document["bouts"]]
    print_arena(arena)
    table = capsys.readouterr().out
    assert "This explorer" in table and "80 %" in table and "ckptplan at 80 %: did not run:" in table
    assert "than this explorer's planner within the same budget" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--only", "gredy"], "no rival 'gredy'"), (["--budgets", "2"], "no share of the peak")],
)
def test_what_cannot_take_part_is_said_before_anything_runs(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(cli.app, [*GPT, *arguments])
    assert result.exit_code == 2 and sentence in result.stderr and not result.stdout
