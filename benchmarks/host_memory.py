"""Memory of the host that a comparison takes, in bytes a parameter: what decides how large a model can be judged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

MODEL = """
import torch
from torch import nn


def build(width=1600, depth=22):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers), (torch.randn(4, width), torch.randn(4, width)), nn.functional.mse_loss
"""

SCRIPT = """
import pathlib, resource, sys, torch
from torch.utils.checkpoint import checkpoint
from explorer.engine.compare.compare import compare
from explorer.engine.bench.measure import measure_pair
from explorer.record import ModelRef, Policy, RunSpec

folder, what = sys.argv[1:]
pathlib.Path(folder, "wide_net.py").write_text({model!r})
spec = dict(model=ModelRef(target=folder + "/wide_net.py:build"), n_repeats=1)
pair = RunSpec(**spec), RunSpec(**spec, policy=Policy.recompute([str(i) for i in range(22)]))
checkpoint(torch.exp, torch.ones(1, requires_grad=True), use_reentrant=False).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{{"pair": measure_pair, "comparison": compare}}[what](*pair)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
N_PARAMETERS = 22 * (1600 * 1600 + 1600)


def peak_bytes(what: str) -> int:
    """Growth of the resident memory of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.format(model=MODEL)
        ran = subprocess.run([sys.executable, "-c", script, folder, what], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[-1])


def main() -> None:
    """Prints one JSON line."""
    took = {what: round(peak_bytes(what) / N_PARAMETERS) for what in ("pair", "comparison")}
    print(json.dumps({"benchmark": "host_memory", **{f"{what}_bytes_a_parameter": n for what, n in took.items()}}))


if __name__ == "__main__":
    main()
