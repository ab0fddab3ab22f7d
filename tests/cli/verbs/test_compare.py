"""A comparison answers by exit code too, and leaves a policy file."""

from __future__ import annotations

from pathlib import Path

from explorer.jobs.client import Worker
from explorer.plan.policy import file as policy_file
from explorer.record.comparison import Comparison
from tests.cli.asked import as_record, read, run


def test_compare_and_the_policy_file_that_comes_of_it(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = str(tmp_path / "policy.yaml")
    document = read("compare", tiny, "--policy", "all", "--repeats", "2", "--out", path)
    record = as_record(document, Comparison)
    assert document["verdict"] == record.verdict == "bitwise equal"
    assert document["candidate"]["saved_after_forward_bytes"] < document["baseline"]["saved_after_forward_bytes"]
    file = policy_file.load(path)
    assert file.policy == record.candidate.spec.policy and file.evidence is not None
    assert file.evidence.verdict == "bitwise equal"
    assert file.evidence.step_peak_bytes == record.candidate.step_peak_bytes
    text = run("compare", tiny, "--policy", path, "--repeats", "2", "--quick").stdout
    assert "bitwise equal" in text and "blocks.0" in text

    checked = read("check", path, tiny)
    assert checked["fresh"] and checked["fingerprint"] == file.fingerprint
    assert "Nothing known goes wrong" in run("check", path, tiny).stdout
    assert checked["not_foretold_because"] == ""
    assert not read("check", path, tiny, "--size", "gpu", code=1)["fresh"]
    other = run("measure", tiny, "--policy", path, "--size", "gpu", "--repeats", "0")
    assert "has changed since or is another one: " in other.stderr

    exported = run("export", path, "--to", "torch").stdout
    assert "def apply_checkpointing(model)" in exported and "blocks.2" in exported
    run("export", path, "--to", "torch", "--out", str(tmp_path / "applied.py"))
    assert (tmp_path / "applied.py").read_text() == exported


def test_a_difference_is_exit_code_1(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.0, blocks.1], preserve_rng_state: false}\n")
    document = read("compare", tiny, "--policy", str(path), "--repeats", "1", code=1)
    assert document["verdict"] == "different" and document["worst"]["name"]
    assert document["worst"]["name"] in run("compare", tiny, "--policy", str(path), "--repeats", "1", code=1).stdout
    assert any(hazard["severity"] == "error" for hazard in read("check", str(path), tiny, code=1)["hazards"])


COUNTS = '''"""Two blocks that count their forwards."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x):
        self.step += 1
        return torch.relu(self.linear(x))


def build():
    return nn.Sequential(Block(), Block()), torch.randn(2, 4)
'''


def test_state_that_moved_twice_is_exit_code_3(shared: Worker, tmp_path: Path) -> None:
    model, out = tmp_path / "counts.py", tmp_path / "policy.yaml"
    model.write_text(COUNTS)
    arguments = ("compare", str(model), "--policy", "all", "--repeats", "0", "--out", str(out))
    document = read(*arguments, code=3)
    assert document["verdict"] == "state moved" and document["n_bitwise_equal"] == document["n_gradients"]
    assert document["moved_twice"] == ["step of 0", "step of 1"]
    evidence = policy_file.load(str(out)).evidence
    assert evidence is not None and evidence.verdict == "state moved"
    printed = run(*arguments, code=3).stdout
    assert "state moved twice: step of 0, step of 1" in printed and "(1 → 2)" in printed
