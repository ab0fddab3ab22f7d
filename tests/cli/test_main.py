"""The command line as scripts rely on it: one document on stdout, one sentence on stderr, and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from explorer.cli import main as cli
from explorer.cli import verbs
from explorer.cli.options import ModelOptions
from explorer.errors import BadInput
from explorer.jobs.client import Worker
from explorer.plan.policy.presets import PRESETS
from tests.cli.asked import read, run


def test_every_verb_explains_itself() -> None:
    listed = run("--help").stdout
    for name in ("models", "graph", "measure", "compare", "check", "export", "lab", "pipeline"):
        assert name in listed and "Usage" in run(name, "--help").stdout
    assert run("--version").stdout.strip()


def test_a_new_verb_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import typer\n\n\ndef greet(name: str) -> None:\n    """Says hello."""\n    typer.echo(f"hello {name}")\n'
    (tmp_path / "greet.py").write_text(code)
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    shell = typer.Typer()
    for one in cli.found_verbs():
        shell.command()(one)
    assert "Says hello." in CliRunner().invoke(shell, ["--help"]).stdout
    assert CliRunner().invoke(shell, ["greet", "you"]).stdout == "hello you\n"
    sys.modules.pop(f"{verbs.__name__}.greet")


def test_check_knows_under_which_conditions_the_policy_runs(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "conditions.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.1], use_reentrant: true, preserve_rng_state: false}\n")

    def rules(*words: str, code: int = 1) -> set[str]:
        return {hazard["rule"] for hazard in read("check", str(path), tiny, *words, code=code)["hazards"]}

    plain = rules()
    assert "dropout-redrawn" in plain
    assert {"dropout-redrawn", "mode-flips"}.isdisjoint(rules("--mode", "eval", code=0))
    for words, rule in (
        (("--autocast", "bfloat16"), "reentrant-autocast"),
        (("--frozen", "blocks.0"), "reentrant-frozen"),
    ):
        assert rule in rules(*words) - plain
    assert "no block or parameter" in run("check", str(path), tiny, "--frozen", "blocs.0", code=2).stderr


def test_a_line_of_flags_is_checked_in_place_of_a_file(shared: Worker, tiny: str) -> None:
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    assert read("check", tiny, "--flags", flags)["read"]["file"]["policy"]["units"][0]["blocks"] == ["blocks.0"]
    for words in ((tiny,), ("policy.yaml", tiny, "--flags", flags)):
        assert "--flags is checked on one model" in run("check", *words, code=2).stderr


def test_arguments_of_the_factory_have_the_type_they_look_like() -> None:
    ref = ModelOptions(arguments=["a=6", "b=0.5", "c=true", "d=x=y", "e=-1e-3", "f="]).ref("m.py")
    assert ref.arguments == {"a": 6, "b": 0.5, "c": True, "d": "x=y", "e": -1e-3, "f": ""}
    with pytest.raises(BadInput, match="=3, x"):
        ModelOptions(arguments=["=3", "x"]).ref("m.py")


def test_presets_are_named_in_the_help() -> None:
    shown = run("compare", "--help").stdout
    assert all(name in shown for name in PRESETS)
