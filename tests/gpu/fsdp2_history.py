"""One rank of FSDP2: three steps of the sample GPT, sharded by block. Writes its history to the folder that is named.

python -m explorer run --card h100 --ranks 2 tests/gpu/fsdp2_history.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sample_models import gpt  # noqa: E402
from tests.gpu.programs import peaks_of, write_document  # noqa: E402


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, stacks="python")
    distributed.init_process_group("nccl")
    sizes: Any = gpt.SIZES["small"]
    model, (inputs, targets), loss = gpt.build(**sizes)
    blocks: Any = model.cuda().blocks
    for part in (*blocks, model):
        fully_shard(part)
    inputs, targets, optimizer = inputs.cuda(), targets.cuda(), torch.optim.AdamW(model.parameters())

    def step() -> None:
        criterion: Any = loss
        criterion(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    peaks = [peaks_of(step) for _ in range(3)]
    write_document("fsdp2", folder / f"imaginary__fsdp2-rank-{rank}.json.gz", limit_bytes=0, said="", step_peaks=peaks)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
