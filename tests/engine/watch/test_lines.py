"""Bytes that no module owns have the line of the user's code. SAVED: tensors of 128 KiB that outlive forward."""

import runpy
from pathlib import Path

import pytest

from explorer.plan.memory.ledger import ledger
from explorer.plan.memory.outside import older_graphs, saved_beside
from explorer.view.memory.blocks import ledger_chart

TRAIN = Path(__file__).with_name("lines_train.txt").read_text()
SAVED = {"forward (train.py:7)": 5, "function (train.py:9)": 1, "lambda (train.py:10)": 2, "other (other.py:1)": 1,
         "train.py:16": 2, "train.py:17": 2}  # fmt: skip


def test_bytes_outside_of_modules_have_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("other", "site-packages/package", "train"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(TRAIN if name == "train" else f"def {Path(name).name}(x): return x.exp()")
        monkeypatch.syspath_prepend(str((tmp_path / name).parent))
    script = runpy.run_path(str(tmp_path / "train.py"))
    text, run, log = repr(script["run"]), script["run"].measurement, script["run"].measurement.allocations
    beside = saved_beside(run, ["0"])
    assert {place: round(size / 2**17) for place, size in beside.items() if size > 2**16} == SAVED
    assert run.by_fqn["0"].saved_after_forward_bytes + sum(beside.values()) == run.saved_after_forward_bytes
    assert {log.lines[log.line[i]] for i, op in enumerate(log.op) if "slice_backward" in log.ops[op]} == {"train.py:16"}
    assert "The graphs of 2 forwards are alive" in text and "by the call of the model in train.py:13" in text
    assert not older_graphs(script["freed"].measurement)
    bars = ledger_chart(ledger(run), ["", "0"]).figure.data
    assert "train.py:16" in text and any("train.py:16" in bar.y for bar in bars)
