"""`export`: the text alone on stdout, how well it fits on stderr, and an exit code that says where nothing fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from explorer.cli.main import app
from explorer.plan.policy import file as policy_file
from explorer.record.base import from_json
from explorer.record.policy import Policy
from explorer.record.policy_file import Export, PolicyFile


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.0", "layers.2"]))))
    return str(path)


def test_the_text_and_what_becomes_of_the_policy(policy: str) -> None:
    answer = CliRunner().invoke(app, ["export", policy, "--to", "megatron"])
    assert answer.exit_code == 0
    assert answer.stdout == "--recompute-granularity full --recompute-method block --recompute-num-layers 2\n"
    assert "approximated in Megatron-LM" in answer.stderr and "It recomputes layers.0, layers.1." in answer.stderr
    assert "layers.2 is kept there and layers.1 is recomputed there" in answer.stderr


def test_what_the_target_does_can_be_measured(policy: str, tmp_path: Path) -> None:
    told = tmp_path / "as_run.yaml"
    answer = CliRunner().invoke(app, ["export", policy, "--to", "megatron", "--as-run", str(told)])
    assert answer.exit_code == 0
    assert policy_file.load_policy(told) == Policy.recompute(
        ["layers.0", "layers.1"], use_reentrant=True, running_stats="every_forward"
    )


def test_one_document(policy: str) -> None:
    answer = CliRunner().invoke(app, ["export", policy, "--to", "names", "--json"])
    form = from_json(answer.stdout, Export)
    assert (form.fit, form.recomputed) == ("exact", ("layers.0", "layers.2")) and "layers: [0, 2]" in form.text


def test_what_cannot_be_said_writes_nothing(tmp_path: Path) -> None:
    policy, out = tmp_path / "policy.yaml", tmp_path / "flags.txt"
    policy.write_text(policy_file.dumps(PolicyFile(policy=Policy.recompute(["head"]))))
    answer = CliRunner().invoke(app, ["export", str(policy), "--to", "megatron", "--out", str(out)])
    assert answer.exit_code == 1 and answer.stdout == "" and not out.exists()
    assert "not expressible in Megatron" in answer.stderr and "export for names" in answer.stderr


def test_an_unknown_target_is_one_sentence(policy: str) -> None:
    answer = CliRunner().invoke(app, ["export", policy, "--to", "megatorn"])
    told = " ".join(answer.stderr.split())
    assert answer.exit_code == 2 and "There is no exporter megatorn. Did you mean megatron" in told
