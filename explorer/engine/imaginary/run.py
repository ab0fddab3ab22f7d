"""Starts a Python command on the imaginary card. Only the new process and its children see the card.

run_on(parse_card("h100"), ["train.py", "--steps", "3"])      a script, as `python train.py --steps 3`
environment(parse_card("24GiB"), n_cards=2)                   what such a process needs in its environment
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from explorer.engine.imaginary.build import build_stubs
from explorer.engine.imaginary.torch_build import torch_build
from explorer.plan.card.cards import capacity_bytes
from explorer.record.card import Card

KIB = 1 << 10
_TABLE = """\
7.0   96  96 2048 32
7.5   64  64 1024 16
8.0  164 163 2048 32
8.6  100  99 1536 16
8.9  100  99 1536 24
9.0  228 227 2048 32
10.0 228 227 2048 32
12.0 100  99 1536 24
"""
MULTIPROCESSOR = {name: tuple(map(int, figures)) for name, *figures in map(str.split, _TABLE.splitlines())}
"""By compute capability: KiB of shared memory of a multiprocessor and of a block, threads and blocks of a
multiprocessor. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
DEFAULT_CAPABILITY, DEFAULT_MULTIPROCESSORS = "8.0", 108
"""Of a card that is known by its size only: those of an A100."""


def environment(card: Card, *, n_cards: int = 1, trace: bool = False) -> dict[str, str]:
    """Variables that a process needs to see `n_cards` such cards; builds the stubs if they are not there.

    Raises BadInput if torch's CUDA build, a compiler or the reader of ELF files is missing.
    """
    torch = torch_build()
    capability = card.capability or DEFAULT_CAPABILITY
    major, minor = capability.split(".")
    shared, shared_block, threads, blocks = MULTIPROCESSOR.get(capability, MULTIPROCESSOR[DEFAULT_CAPABILITY])
    values: dict[str, object] = {
        "NAME": f"{card.name} (imaginary)",
        "BYTES": card.total_bytes,
        "TAKEN": card.total_bytes - capacity_bytes(card),
        "MAJOR": major,
        "MINOR": minor,
        "MULTIPROCESSORS": card.multiprocessors or DEFAULT_MULTIPROCESSORS,
        "SHARED_PER_MULTIPROCESSOR": shared * KIB,
        "SHARED_PER_BLOCK": shared_block * KIB,
        "THREADS_PER_MULTIPROCESSOR": threads,
        "BLOCKS_PER_MULTIPROCESSOR": blocks,
        "COUNT": n_cards,
        "TRACE": int(trace),
        "CUDNN_VERSION": int("{}{:02}{:02}".format(*torch.cudnn)),
        "NCCL_VERSION": int("{}{:02}{:02}".format(*torch.nccl)),
    }
    variables = {f"IMAGINARY_{name}": str(value) for name, value in values.items()}
    variables["LD_PRELOAD"] = ":".join(filter(None, [*map(str, build_stubs()), os.environ.get("LD_PRELOAD")]))
    if card.options:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = card.options
    if card.cublas:
        variables["CUBLAS_WORKSPACE_CONFIG"] = card.cublas
    return variables


def run_on(
    card: Card, argv: Sequence[str], env: Mapping[str, str] | None = None, *, n_cards: int = 1, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python argv...` on `n_cards` such cards. `env`: further variables; `capture`: its output comes back as text."""
    variables = {**os.environ, **environment(card, n_cards=n_cards), **(env or {})}
    return subprocess.run([sys.executable, *argv], env=variables, capture_output=capture, text=True, check=False)
