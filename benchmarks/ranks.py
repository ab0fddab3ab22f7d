"""Predicted bytes of every rank against real gloo ranks under torchrun: splits x policies x models, to the byte.

`tracker_peak_bytes` counts the tensors of a real step that its allocator confirms. What the allocator saw beyond is
listed: gloo's copies inside a collective, the generator's state of a checkpoint (5,056 bytes), numbers (8 bytes).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import distributed

from explorer.engine.model.describe import describe
from explorer.engine.ranks.predict import predict_ranks
from explorer.engine.ranks.real import measure_rank
from explorer.plan.policy.presets import preset
from explorer.plan.predict.calls import RNG_STATE_BYTES
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import Ranks, RunSpec

MODELS = Path(__file__).with_name("_rank_models.py")
SPLIT = f"{MODELS}:split"
SPLITS = {
    "ddp": Ranks(n_ranks=2, data="ddp"),
    "fsdp": Ranks(n_ranks=2),
    "fsdp-no-reshard": Ranks(n_ranks=2, reshard=False),
    "tp": Ranks(n_ranks=2, data="none", n_tensor=2, parallelize=SPLIT),
    "fsdp-tp": Ranks(n_ranks=4, n_tensor=2, parallelize=SPLIT),
}
POLICIES = ("keep-all", "all", "every-2", "keep-products")
KINDS = ("transformer", "tied", "picture")


@dataclass(frozen=True)
class Cell:
    """One step: `tied fsdp every-2`."""

    model: str
    split: str
    policy: str

    @property
    def spec(self) -> RunSpec:
        ref = ModelRef(target=f"{MODELS}:{self.model}")
        return RunSpec(model=ref, policy=preset(self.policy, describe(ref)), ranks=SPLITS[self.split], n_repeats=0)

    @property
    def name(self) -> str:
        return f"{self.model} {self.split} {self.policy}"


@dataclass(frozen=True)
class Difference:
    """Predicted against real on one rank."""

    cell: Cell
    rank: int
    predicted_bytes: int
    real_bytes: int
    allocator_bytes: int
    same_collectives: bool
    without_tensors: Counter[str]
    """Bytes at the allocator's peak that no tensor of the step holds, by operator."""

    @property
    def n_bytes(self) -> int:
        """Apart from whole states of generators, which are predicted and which no tracker of a real step sees."""
        return (self.predicted_bytes - self.real_bytes) % RNG_STATE_BYTES


def differences(cells: Sequence[Cell]) -> Iterator[Difference]:
    """Every rank of every cell; the cells of equal numbers of ranks share one torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks in sorted({SPLITS[cell.split].n_ranks for cell in cells}):
            chosen = [cell for cell in cells if SPLITS[cell.split].n_ranks == n_ranks]
            launch = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={n_ranks}",
                "-m",
                "benchmarks.ranks",
            ]
            command = [sys.executable, *launch, folder, *(cell.name for cell in chosen)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=MODELS.parents[1])
        for cell in cells:
            predicted = predict_ranks(cell.spec)
            for rank in range(predicted.n_ranks):
                run = predicted.by_rank[predicted.equal.get(rank, rank)]
                real = from_msgpack((Path(folder) / f"{cell.name} {rank}").read_bytes(), Measurement)
                assert run.step_peak_bytes and real.step_peak_bytes and real.peaks.tracker_peak_bytes
                peaks = (run.step_peak_bytes, real.peaks.tracker_peak_bytes, real.step_peak_bytes)
                yield Difference(cell, rank, *peaks, calls_of(run) == calls_of(real), without_tensors(real.allocations))


def without_tensors(log: Allocations | None) -> Counter[str]:
    """Bytes at the peak without a tensor, by operator; "" are states of generators and numbers that autograd keeps."""
    found: Counter[str] = Counter()
    assert log is not None
    for n_bytes, born, died, role, op in zip(log.n_bytes, log.born, log.died, log.role, log.op):
        if 0 < born <= log.peak_tick < died:
            hidden = ROLES[role] == "unattributed" or (ROLES[role] == "saved activation" and not log.ops[op])
            found.update({log.ops[op]: n_bytes} if hidden else {})
    return found


def calls_of(run: Measurement) -> Counter[tuple[object, ...]]:
    """Collectives of a step without their moments."""
    return Counter((call.kind, call.n_bytes, call.n_ranks, call.block, call.phase) for call in run.collectives)


def measure_cells(folder: Path, cells: Sequence[Cell]) -> None:
    """One rank of torchrun: writes its measurement of each cell."""
    distributed.init_process_group("gloo")
    for cell in cells:
        (folder / f"{cell.name} {distributed.get_rank()}").write_bytes(to_msgpack(measure_rank(cell.spec)))
    distributed.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        measure_cells(Path(sys.argv[1]), [Cell(*name.split()) for name in sys.argv[2:]])
        return
    kinds, splits, policies = (text.split(",") if text else () for text in (*sys.argv[1:4], "", "", "")[:3])
    cells = [
        Cell(kind, split, policy)
        for split in splits or SPLITS
        for kind in kinds or KINDS
        for policy in policies or POLICIES
    ]
    n_ranks = n_equal = 0
    for one in differences(cells):
        n_ranks, n_equal = n_ranks + 1, n_equal + (one.n_bytes == 0 and one.same_collectives)
        calls = "" if one.same_collectives else "  other collectives"
        print(
            f"{one.cell.name:40} rank {one.rank}  {one.predicted_bytes:>12,}  difference {one.n_bytes:+,}  "
            f"in the allocator {one.allocator_bytes - one.real_bytes:+,} {dict(one.without_tensors)}{calls}",
            flush=True,
        )
    print(f"{n_equal} of {n_ranks} ranks of {len(cells)} steps are equal to the byte, with equal collectives.")


if __name__ == "__main__":
    main()
