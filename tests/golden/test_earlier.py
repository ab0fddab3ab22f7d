"""What an earlier version wrote opens: run files, the store of runs, policy files; and `--json` keeps its names.

The files in `earlier/` were written by version 0.1.0 before its modules were moved into rooms:
`compare`, `measure` and `pipeline` of sample_models/mlp.py with n_layers=3, width=16, batch=4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from explorer.cli.report import document
from explorer.jobs.run_file import KINDS, read
from explorer.jobs.store import Store
from explorer.pipeline.record.step import PipelineRun
from explorer.plan.policy import file as policy_file
from explorer.record import Comparison, Measurement
from explorer.record.base import from_msgpack, to_json

EARLIER = Path(__file__).with_name("earlier")


def opened(name: str) -> Any:
    stored = read((EARLIER / f"{name}.explorer").read_bytes())
    return from_msgpack(stored.record, KINDS[stored.kind])


def test_run_files_open_with_the_figures_they_were_written_with() -> None:
    figures = json.loads((EARLIER / "compare.json").read_text())
    comparison = opened("compare")
    assert isinstance(comparison, Comparison)
    assert comparison.verdict == figures["verdict"] == "bitwise equal"
    for side in ("baseline", "candidate"):
        run = getattr(comparison, side)
        assert run.step_peak_bytes == figures[side]["step_peak_bytes"]
        assert run.forward_flops == figures[side]["forward_flops"]
    measured = opened("measure")
    assert isinstance(measured, Measurement)
    assert measured.step_peak_bytes == json.loads((EARLIER / "measure.json").read_text())["step_peak_bytes"]
    assert isinstance(opened("pipeline"), PipelineRun)


def test_the_store_of_runs_opens(tmp_path: Path) -> None:
    shutil.copy(EARLIER / "runs.sqlite", tmp_path / "runs.sqlite")
    store = Store(tmp_path / "runs.sqlite")
    assert {run.kind for run in store.list()} == {"comparison", "measurement", "pipeline run"}
    for run in store.list():
        assert store.load(run.run_id) is not None


@pytest.mark.parametrize("name", ["policy.yaml", "plan.yaml"])
def test_policy_files_open(name: str) -> None:
    file = policy_file.load(EARLIER / name)
    assert file.policy.units
    assert policy_file.loads(policy_file.dumps(file)).policy == file.policy
    assert (file.pipeline is not None) == (name == "plan.yaml")


def names(document: Any, path: str = "") -> set[str]:
    """Every key of a JSON document with the way to it; the elements of a list count as one."""
    if isinstance(document, dict):
        return {f"{path}.{key}" for key in document} | {
            name for key, value in document.items() for name in names(value, f"{path}.{key}")
        }
    if isinstance(document, list):
        return {name for value in document for name in names(value, path)}
    return set()


@pytest.mark.parametrize("kind", ["compare", "measure"])
def test_json_documents_keep_their_names(kind: str) -> None:
    before = json.loads((EARLIER / f"{kind}.json").read_text())
    now = json.loads(to_json(document(opened(kind))))
    assert names(before) <= names(now), names(before) - names(now)
