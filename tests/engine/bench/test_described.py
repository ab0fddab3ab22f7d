"""Reading a model and measuring it in one job: the graph comes first, and the step is the same."""

from __future__ import annotations

from pathlib import Path

from explorer.engine.bench.measure import measure, measure_and_describe
from explorer.engine.model.describe import describe
from explorer.record.base import from_msgpack
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress
from explorer.record.run import RunSpec

COUNTED = """
import torch
from torch import nn
class Net(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        Net.calls += 1
        for layer in self.layers:
            x = x + layer(x).relu()
        return x * (Net.calls < 1000)
def build():
    with open({log!r}, "a") as file:
        file.write("built ")
    return Net(), torch.randn(16, 8)
"""


def test_the_graph_comes_first_and_costs_no_build(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "net.py"
    file.write_text(COUNTED.format(log=str(log)))
    spec = RunSpec(model=ModelRef(target=f"{file}:build"), n_repeats=1)
    alone = measure(spec)
    n_alone = len(log.read_text().split())
    parts: list[bytes] = []

    def report(progress: Progress) -> None:
        parts.extend([progress.part] if progress.part else [])

    run = measure_and_describe(spec, report)
    assert len(log.read_text().split()) == 2 * n_alone, "a copy is watched, not another build"
    first, recorded = (from_msgpack(part, Measurement) for part in parts[:2])
    assert first.graph == describe(spec.model) == run.graph and first.allocations is None
    assert recorded.allocations is not None and recorded.step_peak_bytes == run.step_peak_bytes == alone.step_peak_bytes
    assert (run.loss, run.total_flops) == (alone.loss, alone.total_flops)
