"""A measurement is one document: the record with its headlines."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from explorer.jobs.store import Store
from explorer.record.measurement import Measurement
from tests.cli.asked import as_record, read, run


def test_measure_prints_the_record_with_its_headlines(shared: Worker, tiny: str, tmp_path: Path) -> None:
    saved = tmp_path / "one.run"
    document = read(
        "measure", tiny, "--policy", "every-2", "--repeats", "2", "--optimizer", "sgd", "--save", str(saved)
    )
    record = as_record(document, Measurement)
    assert record.headlines() == {name: document[name] for name in record.headlines()}
    assert record.spec.policy.blocks == ("blocks.0", "blocks.2") and record.spec.optimizer == "sgd"
    assert document["step_peak_bytes"] > document["saved_after_forward_bytes"] > 0
    store = Store(shared.store_path)
    assert store.load(store.list()[0].run_id) == record == store.load(store.import_file(saved.read_bytes()))
    n_runs = len(store.list())
    text = run("measure", tiny, "--repeats", "2", "--no-store").stdout
    assert "Step peak" in text and "measured" in text and "keep all" in text and len(store.list()) == n_runs


def test_predicted_autocast_is_said_to_be_the_cpus(shared: Worker, tiny: str) -> None:
    asked = ("measure", tiny, "--predict", "--autocast", "bfloat16")
    assert any("Predicted by the CPU's autocast" in warning for warning in read(*asked)["warnings"])
    assert "Predicted by the CPU's autocast: CUDA's lists of operators differ" in " ".join(run(*asked).stdout.split())
    assert not any("autocast" in warning for warning in read(*asked[:3])["warnings"])


def test_a_result_that_cannot_be_saved_is_printed_all_the_same(
    shared: Worker, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("an older policy")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run("compare", tiny, "--policy", "all", "--quick", "--repeats", "0", "--out", str(path), "--json", code=2)
    assert json.loads(result.stdout)["verdict"] == "bitwise equal"
    assert "No space left on device" in result.stderr
    assert path.read_text() == "an older policy" and len(list(tmp_path.glob("policy*"))) == 1
