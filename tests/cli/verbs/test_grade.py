"""`grade` lists challenges, and marks a policy by a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from explorer.cli.main import app
from explorer.cli.verbs import grade as verb
from explorer.plan.challenges import CHALLENGES, Challenge
from explorer.plan.policy import file as policy_file
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.policy_file import PolicyFile

pytestmark = pytest.mark.usefixtures("shared")


def test_they_are_listed() -> None:
    answer = CliRunner().invoke(app, ["grade"])
    assert answer.exit_code == 0 and all(one.task in answer.stdout for one in CHALLENGES.values())
    assert [one["name"] for one in json.loads(CliRunner().invoke(app, ["grade", "--json"]).stdout)] == list(CHALLENGES)


def test_an_unknown_one_is_one_sentence() -> None:
    answer = CliRunner().invoke(app, ["grade", "gtp"])
    assert answer.exit_code == 2
    assert "There is no challenge gtp. Did you mean gpt" in " ".join(answer.stderr.split())


def test_a_policy_is_marked_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of a blink, with limits that recomputing everything keeps and keeping everything does not."""
    model = ModelRef(target="tests/browser/tiny_model.py")
    small = Challenge(name="tiny", task="Fit it.", model=model, peak_bytes=1_500_000, flop_ratio=2.0, hint="All.")
    monkeypatch.setattr(verb, "CHALLENGES", {"tiny": small})
    marked = CliRunner().invoke(app, ["grade", "tiny", "--policy", "all", "--json"])
    document = json.loads(marked.stdout)
    assert marked.exit_code == 0 and document["solved"], document["marks"]
    kept = CliRunner().invoke(app, ["grade", "tiny"])
    assert kept.exit_code == 1
    assert "not met  step peak at most 1.4 MiB" in kept.stdout and "Not solved yet. All." in kept.stdout


PLANNED = Policy.recompute(["stem", "blocks.5", ("blocks.0", "blocks.1", "blocks.2")])
"""What `plan sample_models/resnet.py --budget 40MiB` chose."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "met"),
    [
        ("attention", "blocks.*.attention", [True, True, True]),
        ("resnet", "policy.yaml", [True, True, True]),
        ("resnet", "all", [True, False, True]),
    ],
)
def test_a_whole_run_solves_or_misses_a_challenge(name: str, policy: str, met: list[bool], tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy_file.dumps(PolicyFile(policy=PLANNED)))
    graded = CliRunner().invoke(app, ["grade", name, "--policy", policy.replace(file.name, str(file)), "--json"])
    document = json.loads(graded.stdout)
    assert [mark["met"] for mark in document["marks"]] == met, document["marks"]
    assert document["solved"] == all(met) and graded.exit_code == (0 if all(met) else 1)
