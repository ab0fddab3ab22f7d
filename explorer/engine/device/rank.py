"""Which of several processes this one is, as torchrun says it in the environment."""

from __future__ import annotations

import os
from pathlib import Path


def rank_here() -> tuple[int, int] | None:
    """Rank of this process and how many there are; None where it runs alone."""
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), n_ranks) if n_ranks > 1 else None


def of_rank(path: Path) -> Path:
    """`oom.explorer`, under torchrun `oom.rank3.explorer`."""
    here = rank_here()
    return path if here is None else path.with_name(f"{path.stem}.rank{here[0]}{path.suffix}")


def rank_in_words() -> str:
    """`, rank 3`; empty where this process runs alone."""
    here = rank_here()
    return "" if here is None else f", rank {here[0]}"
