"""Random numbers that do not depend on the split: every block draws from a seed made of (seed, block, microbatch).

A pipelined model runs its microbatches in another order and on other ranks than the unsplit model. A single stream
of random numbers gives other dropout masks. Seeding at the start of a block gives each (block, microbatch) a stream.
If the block is a unit, the seeding is outside the checkpointed function. Torch stashes the generator when the block
starts and restores the generator for recompute, in B as in I and W. Blocks inside a larger unit are seeded again by
the microbatch whose backward runs. Operations between two blocks continue the stream of the first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

PRIME = 1_000_003
START = "(start)"
"""The stretch before the first block."""


@dataclass
class KeyedRng:
    """Seeds torch's default generators by block and microbatch; does nothing when `enabled` is False."""

    seed: int
    chain: tuple[str, ...]
    enabled: bool = True
    index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {fqn: k for k, fqn in enumerate((START, *self.chain))}

    def enter(self, block: str, microbatch: int) -> None:
        """`block` of the chain (or START) is about to run forward for `microbatch`."""
        if self.enabled and block in self.index:
            torch.manual_seed(((self.seed * PRIME + self.index[block]) * PRIME + microbatch) % 2**63)

    @contextmanager
    def listening(self, model: nn.Module, microbatches: Iterable[int]) -> Iterator[Iterator[int]]:
        """For an unsplit model: hooks that seed its blocks; yields an iterator that moves on to the next microbatch."""
        current = [0]
        hooks = [
            model.get_submodule(fqn).register_forward_pre_hook(
                lambda module, args, fqn=fqn: self.enter(fqn, current[0])
            )
            for fqn in self.chain
        ]

        def each() -> Iterator[int]:
            for microbatch in microbatches:
                current[0] = microbatch
                self.enter(START, microbatch)
                yield microbatch

        try:
            yield each()
        finally:
            for hook in hooks:
                hook.remove()
