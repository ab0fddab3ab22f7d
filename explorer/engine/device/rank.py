"""Rank of this process among several, from torchrun's environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def rank_here() -> tuple[int, int] | None:
    """Rank of this process and the number of ranks; None for a process that runs alone."""
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), n_ranks) if n_ranks > 1 else None


def of_rank(path: Path) -> Path:
    """The path with the rank: `oom.explorer` becomes `oom.rank3.explorer` under torchrun."""
    here = rank_here()
    return path if here is None else path.with_name(f"{path.stem}.rank{here[0]}{path.suffix}")


def rank_in_words() -> str:
    """The rank as text: `, rank 3`; empty for a process that runs alone."""
    here = rank_here()
    return "" if here is None else f", rank {here[0]}"
