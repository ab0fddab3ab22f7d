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


OWN_OPTIMIZER = """
from msgspec.structs import replace
from explorer.engine.bench.measure import measure_without_data
from explorer.engine.bench.step import prepare
from explorer.plan.card.cards import CARDS
from explorer.record import ModelRef, RunSpec
from tests.golden.b200.loop import STEPS
step, n = STEPS["forward+loss+backward+AdamW"], 10
spec = RunSpec(model=ModelRef(target="benchmarks/_b200_language_model.py:build", arguments={"seq": 128}),
               optimizer="none", n_repeats=0, holds_output=True)
memory = measure_without_data(replace(spec, card=replace(CARDS["b200"], cublas="", n_steps=n)), step=step).card
out["predicted"] = [memory.least_allocated_bytes, memory.allocated_bytes, memory.reserved_bytes]
trainee, out["counted"] = prepare(replace(spec, device="cuda")), []
for _ in range(n):
    torch.cuda.reset_peak_memory_stats()
    step(trainee, lambda phase: None)
    out["counted"].append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
"""


@has_cuda_build
def test_the_interval_over_steps_of_an_optimizer_out_of_place_is_torchs() -> None:
    """Every step has other addresses, so an allocation that is wrong in the first step shows in all that follow."""
    seen = values_on(parse_card("b200"), OWN_OPTIMIZER, CUBLAS_WORKSPACE_CONFIG="")
    allocated, reserved = zip(*seen["counted"][1:], strict=True)  # type: ignore[index]
    assert seen["predicted"] == [min(allocated), max(allocated), reserved[-1]]
    assert len(set(allocated)) > 5, "the steps differ"
