"""The table of submodules worth recomputing is what runs of them show, and where nothing is gained it says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.plan.why.peak import SMALL_CHANGE
from explorer.plan.why.worth import worth_recomputing
from explorer.record import Measurement, ModelGraph, ModelRef, Policy, RunSpec

NETS = '''
import torch
from torch import nn

class Core(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(32, 96), Core(), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        x = x + self.out(self.core(*self.qkv(x).chunk(3, -1)))
        return x + self.mlp(x)

class Heavy(nn.Module):
    """Its optimizer holds the peak, so recomputing gains nothing anywhere."""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        return self.b(self.a(x).tanh())

def layers(): return nn.Sequential(*(Layer() for _ in range(4))), torch.randn(4, 32, 32)
def heavy(): return Heavy(), torch.randn(2, 512)
'''


def described(target: str, optimizer: str) -> tuple[Measurement, ModelGraph]:
    ref = ModelRef(target=target) if ":" in target else ModelRef(target=f"sample_models/{target}.py")
    spec = RunSpec(model=ref, optimizer=optimizer, n_repeats=0)
    return measure(spec), describe(ref)


def blocks_of(kind: str, graph: ModelGraph) -> list[str]:
    """The submodules that a row is about: `*.mlp (4 Sequential)`."""
    pattern, _, rest = kind.partition(" (")
    form = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    of_kind = rest.rpartition(" ")[2].rstrip(")")
    return [b.fqn for b in graph.blocks if form.fullmatch(b.fqn) and b.n_calls and of_kind in ("", b.kind)]


@pytest.mark.parametrize("name", ["layers", "heavy", "mlp"])
def test_a_row_without_a_reason_lowers_the_measured_peak_and_a_row_with_one_does_not(name: str, tmp_path: Path) -> None:
    (path := tmp_path / "nets.py").write_text(NETS)
    target, optimizer = (name, "sgd") if name == "mlp" else (f"{path}:{name}", "adamw")
    run, graph = described(target, optimizer)
    rows = worth_recomputing(run, graph)
    before = run.step_peak_bytes or 0
    assert rows and any(row["why no gain"] for row in rows)
    for row in rows:
        blocks = blocks_of(row["worth recomputing?"], graph)
        assert row["worth recomputing?"] == blocks[0] or f"({len(blocks)} " in row["worth recomputing?"]
        measured = measure(replace(run.spec, policy=Policy.recompute(blocks))).step_peak_bytes or 0
        assert (measured <= (1 - SMALL_CHANGE) * before) is (not row["why no gain"]), row
    if name == "heavy":
        assert all("optimizer step" in row["why no gain"] for row in rows)
    if name == "layers":
        (qkv,) = (row for row in rows if "qkv" in row["worth recomputing?"])
        assert "a checkpoint keeps its inputs, and *.core its outputs" in qkv["why no gain"]


def test_a_run_with_a_policy_or_without_a_graph_has_no_table() -> None:
    run, graph = described("mlp", "sgd")
    assert not worth_recomputing(run, None)
    assert not worth_recomputing(replace(run, spec=replace(run.spec, policy=Policy.recompute(["1"]))), graph)
