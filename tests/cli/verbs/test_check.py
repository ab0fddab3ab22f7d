"""Policies from outside on the command line: read through one door, told on stderr, written out by `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from explorer.cli.main import app
from explorer.plan.policy import file as policy_file
from explorer.record.policy import Policy

pytestmark = pytest.mark.usefixtures("shared")

NET = """
from torch import nn, randn

def build(n=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n))), randn(4, 8)
"""


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments), terminal_width=120)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:build"


def test_settings_become_a_policy_file_that_measures_and_exports(net: str, tmp_path: Path) -> None:
    settings, out = tmp_path / "train.sh", tmp_path / "policy.yaml"
    settings.write_text("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2")
    told = run("check", str(settings), net, "--out", str(out))
    assert "Read from Megatron-LM of" in told.stderr and "exact" in told.stderr
    file = policy_file.load(out)
    assert file.policy == Policy.recompute([("0", "1"), ("2", "3")])
    assert file.fingerprint and file.blocks == {"*": 4, "*.*": 8}
    assert "not a policy file" in run("export", str(settings), "--to", "torch", code=2).stderr
    assert "(('0', '1'), 'recompute', ())" in run("export", str(out), "--to", "torch").stdout
    answer = run("compare", net, "--policy", str(settings), "--repeats", "0", "--quick", "--json", "--no-store")
    assert json.loads(answer.stdout)["verdict"] == "bitwise equal"
    assert "Read from Megatron-LM" in answer.stderr


def test_a_changed_model_and_patterns_are_told(net: str, tmp_path: Path) -> None:
    path, out = tmp_path / "policy.yaml", tmp_path / "names.yaml"
    path.write_text("version: 1\npolicy: {units: ['*']}\n")
    assert "names blocks by pattern (*)" in run("export", str(path), "--to", "torch", code=2).stderr
    assert "* stands for 4 units: 0, 1, 2 and 1 more." in run("check", str(path), net, "--out", str(out)).stderr
    document = json.loads(run("check", str(out), net, "--set", "n=6", "--json", code=1).stdout)
    assert "* are 6, and were 4" in document["stale_because"] and not document["fresh"]
    assert document["read"]["file"]["policy"]["units"][0]["blocks"] == ["0"]
    fewer = run("check", str(out), net, "--set", "n=2", code=1)
    assert "has no block 2, 3" in fewer.stdout
