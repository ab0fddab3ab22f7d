"""Bytes that no module owns have the file and line of the user's code, in forward and in backward."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.plan.memory.ledger import ledger
from explorer.plan.memory.outside import by_line, older_graphs
from explorer.record.allocations import Allocations
from explorer.record.base import column

TRAIN = """
import torch
from torch import nn
import explorer
{head}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def method(self, x):
        return x{of_model}
    def forward(self, x):
        return self.method(self.a(x))
model, x = Net(), torch.randn(4096, 8)
with explorer.record_step(model) as run:
    out = model(x)
{loss}
    loss.backward()
"""
N_BYTES = 4096 * 8 * 4
FUNCTION = "def criterion(out):\n    return out.exp().sum()"
CASES: dict[str, tuple[str, str, str, str]] = {
    "a function": (f"{FUNCTION}  # HERE", "", "loss = criterion(out)", "criterion (train.py:{})"),
    "another file": ("from other import criterion", "", "loss = criterion(out)", "criterion (other.py:2)"),
    "a lambda": ("f = lambda out: out.exp().sum()  # HERE", "", "loss = f(out)", "lambda (train.py:{})"),
    "the loop": ("", "", "loss = out.exp().sum()  # HERE", "train.py:{}"),
    "a comprehension": ("", "", "loss = torch.stack([out.exp() for _ in range(2)]).sum()  # HERE", "train.py:{}"),
    "a method": ("", ".exp()  # HERE", "loss = out.sum()", "method (train.py:{})"),
    "a package": ("from package import criterion", "", "loss = criterion(out)  # HERE", "train.py:{}"),
    "torch": ("", "", "loss = nn.functional.softmax(out, -1).sum()  # HERE", "train.py:{}"),
}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **parts: str) -> Any:
    """The recorded run of the script, beside a file and an installed package that it may import."""
    gc.collect()  # tensors of an earlier script are inputs of this one
    packages = folder / "site-packages"
    packages.mkdir()
    for file in (folder / "other.py", packages / "package.py"):
        file.write_text(FUNCTION)
        monkeypatch.syspath_prepend(str(file.parent))
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    (folder / "train.py").write_text(TRAIN.format(**parts))
    return runpy.run_path(str(folder / "train.py"))["run"]


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_outside_of_modules_have_their_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, of_model, loss, place = CASES[case]
    run = trained(tmp_path, monkeypatch, head=head, of_model=of_model, loss=f"    {loss}")
    text = (tmp_path / "train.py").read_text().splitlines()
    place = place.format(next((i for i, line in enumerate(text, 1) if "HERE" in line), 0))
    at = ledger(run.measurement)
    saved = {cell.line: cell.n_bytes for cell in at.cells if cell.role == "saved activation" and cell.line}
    assert saved[place] >= N_BYTES
    assert next(iter(by_line(at))) == place and place in repr(run)
    assert all(not cell.line for cell in at.cells if cell.block)


def test_an_operator_of_backward_has_the_line_of_its_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view allocates nothing in forward, and its backward a whole gradient."""
    loss = "    parts = [out[:64], out[64:]]  # HERE\n    loss = parts[0].exp().sum()\n    loss = loss + parts[1].sum()"
    run = trained(tmp_path, monkeypatch, head="", of_model="", loss=loss)
    log: Allocations = run.measurement.allocations
    text = (tmp_path / "train.py").read_text().splitlines()
    line = next(i for i, line in enumerate(text, 1) if "HERE" in line)
    slices = [i for i, op in enumerate(log.op) if "slice_backward" in log.ops[op]]
    assert len(slices) == 2
    assert {log.lines[log.line[i]] for i in slices} == {f"train.py:{line}"}


def test_an_older_record_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, monkeypatch, head="", of_model="", loss="    loss = out.exp().sum()").measurement
    log: Allocations = run.allocations
    older = replace(run, allocations=replace(log, line=column(), lines=(), calls=replace(log.calls, line=column())))
    assert ledger(older).total_bytes == ledger(run).total_bytes
    assert by_line(ledger(run)) and not by_line(ledger(older)) and not older_graphs(older)


LOOPS = {
    "a list": ("    losses = [model(x).exp().sum() for x in (x, x, x)]  # HERE\n    loss = sum(losses)", 3),
    "retained": (
        "    for _ in range(2):\n        kept = model(x).exp().sum()  # HERE\n"
        "        kept.backward(retain_graph=True)\n        out = kept, out\n    loss = model(x).exp().sum()",
        3,
    ),
    "freed": ("    for _ in range(2):\n        model(x).exp().sum().backward()\n    loss = out.sum()", 0),
    "no graph": ("    with torch.no_grad():\n        old = [model(x) for _ in range(3)]\n    loss = out.sum()", 0),
}


@pytest.mark.parametrize("case", LOOPS)
def test_graphs_of_earlier_forwards_are_counted(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, n_graphs = LOOPS[case]
    run = trained(tmp_path, monkeypatch, head="", of_model=".exp()", loss=loss)
    sentence = older_graphs(run.measurement)
    if not n_graphs:
        assert not sentence
        return
    text = (tmp_path / "train.py").read_text().splitlines()
    line = next(i for i, line in enumerate(text, 1) if "HERE" in line)
    assert f"The graphs of {n_graphs} forwards are alive" in sentence and f"train.py:{line}" in sentence
    assert sentence in repr(run)
