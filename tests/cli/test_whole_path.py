"""The whole path on two models: a trainer's settings, compare, policy file, check, export for three programs, and those
run in a process of their own: the chosen layers run again, and every gradient is bit by bit that of the model without
a policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from explorer.cli.main import app
from tests.exported import LAYERS, LLAMA, file_of, layers_again, run_there

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared")]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), terminal_width=120)
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.parametrize(
    ("net", "holder", "targets"),
    [
        (LAYERS, "layers", ("torch", "fsdp2", "lightning")),
        (LLAMA, "model.layers", ("torch", "huggingface", "lightning")),
    ],
    ids=["layers", "llama"],
)
def test_what_was_chosen_here_runs_there(net: str, holder: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    if "transformers" in net:
        pytest.importorskip("transformers")
    (tmp_path / "net.py").write_text(net)
    model, policy = f"{tmp_path / 'net.py'}:build", str(tmp_path / "policy.yaml")
    settings = tmp_path / "trainer.yaml"
    settings.write_text("activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2}\n")
    quick = ("--repeats", "0", "--no-store", "--json")
    compared = run("compare", model, "--policy", str(settings), "--out", policy, *quick)
    assert json.loads(compared.stdout)["verdict"] == "bitwise equal"
    assert json.loads(run("check", policy, model, "--json").stdout)["fresh"]
    for target in targets:
        fit = json.loads(run("export", policy, "--to", target, "--json").stdout)
        assert fit["fit"] == "exact" and fit["recomputed"] == [f"{holder}.0", f"{holder}.2"]
        run("export", policy, "--to", target, "--out", str(tmp_path / file_of(target)))
    for target, outcome in run_there(tmp_path, targets).items():
        assert outcome["same"], target
        assert layers_again(outcome, holder) == {f"{holder}.0", f"{holder}.2"}, (target, outcome)
