"""The product on the imaginary card: bytes are torch's own, and what the card has not is said."""

from __future__ import annotations

from pathlib import Path

from explorer.engine.imaginary.run import run_on
from explorer.plan.card.cards import parse_card
from tests.engine.imaginary.test_run import has_cuda_build, values_on

COMPARED = """
from explorer.engine.compare.compare import compare
from explorer.record import KEEP_ALL, ModelRef, Policy, RunSpec
from msgspec.structs import replace
kept = RunSpec(model=ModelRef(target="sample_models/gpt.py"), device="cuda", n_repeats=3)
both = compare(kept, replace(kept, policy=Policy.recompute(["blocks.0", "blocks.1"])))
out["verdict"], out["why"] = both.verdict, both.not_reproducible_because
runs = both.baseline, both.candidate
out["times"] = [run.times is not None and run.times.step.median_ms is not None for run in runs]
out["peaks"] = [[run.step_peak_bytes, run.peaks.requested_peak_bytes] for run in runs]
out["where"] = both.baseline.environment.device_name
"""


@has_cuda_build
def test_a_comparison_has_bytes_and_neither_values_nor_times() -> None:
    seen = values_on(parse_card("h100"), COMPARED)
    assert seen["verdict"] == "not comparable" and "imaginary" in str(seen["why"])
    assert seen["times"] == [False, False] and "imaginary" in str(seen["where"])
    (kept, counted), (recomputed, counted_again) = seen["peaks"]  # type: ignore[misc]
    assert kept == counted > recomputed == counted_again


RANK = """
import os, torch
from torch import nn
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(4, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
names = [None] * 2
dist.all_gather_object(names, rank)
print("rank", rank, "of", dist.get_world_size(), torch.cuda.max_memory_allocated() > 0, flush=True)
dist.destroy_process_group()
"""


@has_cuda_build
def test_two_ranks_train_in_a_process_each(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "rank.py")]
    ran = run_on(parse_card("a100-80gb"), torchrun, n_cards=2, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert {line for line in ran.stdout.splitlines() if line.startswith("rank")} == {
        "rank 0 of 2 True", "rank 1 of 2 True"
    }  # fmt: skip
