"""A history that torch's own allocator records: `python -m explorer.engine.imaginary h100 snapshot.py FILE.pickle`.

No frames are recorded: they would name the folders of this machine.
"""

from __future__ import annotations

import sys

import torch


def main(file: str) -> None:
    torch.cuda.memory._record_memory_history(context=None)
    kept = []
    for i in range(1200):
        first = torch.empty(1000 + 7 * i, device="cuda")
        second = first + 1
        if i % 150 == 0:
            kept.append(second)
        del first
    torch.cuda.memory._dump_snapshot(file)


if __name__ == "__main__":
    main(sys.argv[1])
