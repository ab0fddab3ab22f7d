"""Rotor's dynamic program: the fastest schedule of a chain of blocks that are unlike each other, under a memory limit.

Source: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019, arXiv:1911.13214, theorem 1. Here without
temporaries of operators, and without times of backward, which no schedule changes.

The blocks s..t, the input of s in memory and not counted, are trained in m bytes either by

    keeping s                 s saves all it needs, s+1..t in what is left, then backward of s
    checkpointing the input   s..u-1 run and save nothing but the input of u; u..t in what is left; then s..u-1 again

and the cheaper one is taken, for every s, t and m. What is rerun may be checkpointed inside again (nested).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_SLOTS = 500
"""Memory is counted in so many equal parts of the limit, sizes rounded up."""
_KEEP = -1


@dataclass(frozen=True, kw_only=True)
class HeterogeneousChain:
    """Block by block: time of a forward, what it saves (its output included), and its output."""

    forward_ms: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Blocks `first` to before `end`, recomputed together from the input of the first."""

    first: int
    end: int
    inside: tuple[Piece, ...] = ()
    """What of them is recomputed a second time when they run again."""


@dataclass(frozen=True, kw_only=True)
class ChainSchedule:
    """What runs again; blocks in no piece are kept."""

    pieces: tuple[Piece, ...]

    @property
    def is_nested(self) -> bool:
        return any(piece.inside for piece in self.pieces)


def cheapest_schedule(
    chain: HeterogeneousChain, memory_bytes: int, *, nested: bool = True, n_slots: int = N_SLOTS
) -> ChainSchedule | None:
    """None where no schedule keeps the limit. `nested` False reruns every piece at once and whole."""
    if memory_bytes <= 0:
        return None
    n_blocks = len(chain.forward_ms)  # behind them the loss, as in the paper: it costs and holds nothing
    table = _Table(chain, memory_bytes / n_slots, n_slots, nested=nested)
    if math.isinf(table.cost[0, n_blocks][n_slots]):
        return None
    return ChainSchedule(pieces=tuple(table.pieces(0, n_blocks, n_slots)))


class _Table:
    """The cost of every stretch in every memory, and by which choice."""

    def __init__(self, chain: HeterogeneousChain, slot_bytes: float, n_slots: int, *, nested: bool) -> None:
        n = len(chain.forward_ms) + 1
        self._saved = [math.ceil(size / slot_bytes) for size in (*chain.saved_bytes, 0)]
        self._output = [math.ceil(size / slot_bytes) for size in (*chain.output_bytes, 0)]
        self._until = np.concatenate([[0.0], np.cumsum((*chain.forward_ms, 0.0))])
        self._memory, self._nested = np.arange(n_slots + 1), nested
        self.cost: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._choice: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._kept: dict[tuple[int, int], NDArray[np.float64]] = {}
        for length in range(n):
            for first in range(n - length):
                self._fill(first, first + length)

    def pieces(self, first: int, last: int, memory: int) -> Iterator[Piece]:
        """The choices that lead to the cheapest, read back."""
        while first <= last:
            choice = int(self._choice[first, last][memory])
            if choice == _KEEP:
                memory -= self._saved[first]
                first += 1
            else:
                inside = tuple(self.pieces(first, choice - 1, memory)) if self._nested else ()
                yield Piece(first=first, end=choice, inside=inside)
                memory -= self._output[choice - 1]
                first = choice

    def _fill(self, first: int, last: int) -> None:
        keep = self._where(self._keeping(first, last), self._forward(first, first))
        kept = keep.copy()
        if first < last:
            keep += self._less(self.cost[first + 1, last], self._saved[first])
            kept += self._less(self._kept[first + 1, last], self._saved[first])
        best, choice = keep, np.full(len(keep), _KEEP)
        again = self._kept if not self._nested else self.cost
        for middle in range(first + 1, last + 1):
            rest = self._less(self.cost[middle, last], self._output[middle - 1])
            cost = self._where(self._passing(first, last), self._forward(first, middle - 1))
            cost += rest + again[first, middle - 1]
            better = cost < best
            best, choice = np.where(better, cost, best), np.where(better, middle, choice)
        self.cost[first, last], self._choice[first, last], self._kept[first, last] = best, choice, kept

    def _where(self, needs: int, cost: float) -> NDArray[np.float64]:
        return np.where(self._memory >= needs, cost, math.inf)

    def _forward(self, first: int, last: int) -> float:
        return float(self._until[last + 1] - self._until[first])

    def _less(self, cost: NDArray[np.float64], taken: int) -> NDArray[np.float64]:
        """`cost` by the memory before so much of it was taken."""
        given = np.full(len(cost), math.inf)
        if taken < len(cost):
            given[taken:] = cost[: len(cost) - taken]
        return given

    def _keeping(self, first: int, last: int) -> int:
        """To run `first` forward beside the gradient of the stretch's output, and backward beside its own."""
        return self._saved[first] + max(self._output[first], self._output[last])

    def _passing(self, first: int, last: int) -> int:
        """To run through the stretch saving nothing: two outputs at once, and the gradient of the last."""
        pairs = (self._output[i - 1] + self._output[i] for i in range(first + 1, last))
        return self._output[last] + max(self._output[first], *pairs, 0)
