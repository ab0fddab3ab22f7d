"""Which of several processes this one is, as torchrun says it in the environment."""

from __future__ import annotations

import os


def rank_here() -> tuple[int, int] | None:
    """Rank of this process and how many there are; None where it runs alone."""
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), n_ranks) if n_ranks > 1 else None
