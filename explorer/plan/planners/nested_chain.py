"""Segments inside segments of a chain: the least recomputing beside so many bytes of checkpoints, as Revolve finds it.

chain.py proves the best flat segments, which need about sqrt(n) checkpoints. Segments inside segments need about
log(n), and one checkpoint at the least. Blocks i to j run forward again, then backward, beside M bytes:

    again(i, j, M) = min of   keep i           f(i)    + again(i + 1, j, M - kept(i))
                              segment [i, s)   f(i, s) + again(s, j, M - input(s)) + again(i, s, M)

f is the cost of a forward. The last piece of a rerun is never a segment: a rerun ends where it would enter one. The
step's own forward is the same recursion without its costs f. Bytes are counted in grains, so every answer is judged by
the exact forecast. See Griewank and Walther, Algorithm 799: Revolve (2000).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from explorer.plan.names import Fqns
from explorer.plan.planners.candidates import Candidates, block_costs, chain_stretches
from explorer.plan.planners.program import Limits
from explorer.plan.policy.counted import in_error
from explorer.plan.predict.calls import saved_by_calls
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.replay import Replay
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

LEAST_BLOCKS = 4
"""Segments of a shorter chain have no segments inside."""
MOST_BLOCKS = 40
"""A longer chain of unequal blocks would take seconds."""
MOST_EQUAL_BLOCKS = 200
N_GRAINS, N_GRAINS_UNEQUAL, MOST_GRAINS = 1024, 256, 8192
EQUAL = 0.02
"""Blocks whose costs and bytes differ by a smaller share are equal."""
N_ABOVE_THE_LEAST = 8
"""Choices of least memory that are forecast: the least in grains may not be the least in bytes."""

Costs = NDArray[np.float64]


class Table(NamedTuple):
    """For every number of grains: the least cost of a stretch, and its first piece (its end; 0: the block is kept)."""

    cost: Costs
    piece: NDArray[np.int64]


class NestedChoice(NamedTuple):
    """A choice of nested segments, with the peak and the cost of its forecast."""

    policy: Policy
    peak_bytes: int
    cost: float


def _after(cost: Costs, grains: int) -> Costs:
    """The costs beside `grains` bytes that are held already."""
    if grains > len(cost):
        return np.full(len(cost), np.inf)
    return np.concatenate((np.full(grains, np.inf), cost[: len(cost) - grains]))


@dataclass(slots=True, kw_only=True)
class Revolve:
    """The recursion over n blocks: `forward` is the cost of each, `block_grains` and `input` are in grains."""

    forward: Sequence[float]
    block_grains: Sequence[int]
    """Grains that a kept block adds: what it saves, and the input of the next block."""
    input: Sequence[int]
    n_grains: int = N_GRAINS
    equal: bool = False
    """True if all blocks are equal: a stretch is then known by its length."""
    _again: dict[tuple[int, int], Table] = field(default_factory=dict)
    _first: list[Table] = field(default_factory=list)
    _longest: list[Table] = field(default_factory=list)
    """As `_first`; of pieces of equal cost the longest, whose late rerun is beside the fewest kept blocks."""

    def __post_init__(self) -> None:
        n = len(self.forward)
        nothing = Table(np.zeros(self.n_grains + 1), np.zeros(self.n_grains + 1, dtype=np.int64))
        for length in range(1, n + 1):
            for i in range(1 if self.equal else n - length + 1):
                self._again[i, i + length] = self._best_of(i, i + length, nothing)
        self._first, self._longest = [nothing] * (n + 1), [nothing] * (n + 1)
        for i in range(n - 1, -1, -1):
            pieces = [(0, _after(self._first[i + 1].cost, self.block_grains[i]))]
            for s in range(i + 1, n + 1):
                input_grains = self.input[s] if s < n else 0
                pieces.append((s, _after(self._first[s].cost, input_grains) + self.again(i, s).cost))
            self._first[i] = _least(pieces)
            self._longest[i] = _least(pieces[::-1])

    def again(self, i: int, j: int) -> Table:
        """The table of a rerun of blocks `i` to before `j`; its pieces are relative to `i`."""
        return self._again[(0, j - i) if self.equal else (i, j)]

    def _best_of(self, i: int, j: int, nothing: Table) -> Table:
        rest = nothing if i + 1 == j else self.again(i + 1, j)
        pieces = [(0, self.forward[i] + _after(rest.cost, self.block_grains[i]))]
        until = 0.0
        for s in range(i + 1, j):
            until += self.forward[s - 1]
            cost = until + _after(self.again(s, j).cost, self.input[s]) + self.again(i, s).cost
            pieces.append((s - i, cost))
        return _least(pieces)

    def least_grains(self, most_cost: float = np.inf) -> int | None:
        """The fewest grains within which the whole chain costs at most `most_cost`; None if there are none."""
        cost = self._first[0].cost
        enough = np.flatnonzero(np.isfinite(cost) & (cost <= most_cost))
        return int(enough[0]) if len(enough) else None

    def cost(self, grains: int) -> float:
        """The cost of the best choice within `grains`."""
        return float(self._first[0].cost[grains])

    def segments(self, grains: int, *, longest: bool = False) -> list[tuple[int, int]]:
        """First and end of each segment of the best choice within `grains`, outer ones first.

        Of choices with equal costs the one that begins with kept blocks, or with the longest segment.
        """
        i, n, left = 0, len(self.forward), grains
        tables = self._longest if longest else self._first
        segments: list[tuple[int, int]] = []
        while i < n:
            s = int(tables[i].piece[left])
            if s:
                segments += [(i, s), *self._inside(i, s, left)]
                left -= self.input[s] if s < n else 0
            else:
                left -= self.block_grains[i]
            i = s or i + 1
        return segments

    def _inside(self, i: int, j: int, left: int) -> Iterator[tuple[int, int]]:
        while i < j:
            piece = int(self.again(i, j).piece[left])
            if piece:
                yield i, i + piece
                yield from self._inside(i, i + piece, left)
                left -= self.input[i + piece]
            else:
                left -= self.block_grains[i]
            i += piece or 1


def _least(pieces: Sequence[tuple[int, Costs]]) -> Table:
    costs = np.stack([cost for _, cost in pieces])
    best = costs.argmin(axis=0)
    return Table(costs[best, np.arange(costs.shape[1])], np.array([piece for piece, _ in pieces])[best])


@dataclass(slots=True, kw_only=True)
class NestedChain:
    """Nested segments of the longest chain of a measured step, each choice judged by its forecast."""

    forecaster: Forecaster
    chain: Fqns
    revolve: Revolve
    step_cost: float
    cost_unit: str
    _judged: dict[tuple[tuple[int, int], ...], NestedChoice | None] = field(default_factory=dict)

    def solve(self, limits: Limits) -> NestedChoice | None:
        """The best choice found within `limits`; None if there is none."""
        if limits.budget_bytes is not None:
            return self.within(limits.budget_bytes)
        return self.lowest(math.inf if limits.most_cost is None else limits.most_cost)

    def within(self, budget_bytes: int) -> NestedChoice | None:
        """The cheapest choice found whose forecast is within the budget; None if there is none.

        Bisection over the grains: a choice over the budget is asked again with fewer.
        """
        below, most = self.revolve.least_grains(), self.revolve.n_grains
        if below is None:
            return None
        fitting = []
        while below <= most:
            grains = (below + most) // 2
            judged = self._judge(grains)
            if judged is None or judged.peak_bytes > budget_bytes:
                most = grains - 1
            else:
                fitting.append(judged)
                below = grains + 1
        return min(fitting, key=lambda judged: judged.cost, default=None)

    def lowest(self, most_cost: float) -> NestedChoice | None:
        """The lowest peak of the choices that cost at most `most_cost`."""
        least = self.revolve.least_grains(most_cost)
        if least is None:
            return None
        choices: dict[tuple[tuple[int, int], ...], NestedChoice | None] = {}
        for grains in range(least, self.revolve.n_grains + 1):
            choices[tuple(self.revolve.segments(grains))] = self._judge(grains)
            if len(choices) == N_ABOVE_THE_LEAST:
                break
        within = [choice for choice in choices.values() if choice and choice.cost <= most_cost * (1 + 1e-9)]
        return min(within, key=lambda choice: (choice.peak_bytes, choice.cost), default=None)

    def _judge(self, grains: int) -> NestedChoice | None:
        """The lower forecast of the best choices within `grains`; None if none is predicted."""
        judged = [self._forecast(tuple(self.revolve.segments(grains, longest=longest))) for longest in (False, True)]
        return min(filter(None, judged), key=lambda choice: choice.peak_bytes, default=None)

    def _forecast(self, segments: tuple[tuple[int, int], ...]) -> NestedChoice | None:
        if segments not in self._judged:
            policy = Policy(units=tuple(Unit(blocks=self.chain[first:end]) for first, end in segments))
            forecast = self.forecaster.forecast(policy)
            ratio = forecast.time_ratio if self.cost_unit == "ms" else forecast.flop_ratio
            peak = forecast.step_peak_bytes
            self._judged[segments] = None
            if peak is not None and ratio is not None:
                self._judged[segments] = NestedChoice(policy, peak, (ratio - 1) * self.step_cost)
        return self._judged[segments]


def nested_chain(forecaster: Forecaster, graph: ModelGraph, candidates: Candidates) -> NestedChain | None:
    """The longest chain of the model; None if its blocks run more than once, are few or unsafe."""
    chain = max(chain_stretches(graph), key=len, default=())
    replay = forecaster.replay
    if replay is None or len(chain) < LEAST_BLOCKS or not all(len(replay.calls.get(fqn, ())) == 1 for fqn in chain):
        return None
    if forecaster.baseline is None or in_error(graph, [(fqn,) for fqn in chain]):
        return None
    forward = block_costs(forecaster.baseline, graph, chain)
    block_bytes, inputs = _bytes_of(replay, chain)
    equal = all(max(values) <= (1 + EQUAL) * min(values) for values in (forward, block_bytes[:-1], inputs[1:]))
    if len(chain) > (MOST_EQUAL_BLOCKS if equal else MOST_BLOCKS):
        return None
    if equal:
        forward = [float(np.mean(forward))] * len(chain)
        block_bytes, inputs = [max(block_bytes[:-1])] * len(chain), [max(inputs[1:])] * len(chain)
    most_bytes, input_bytes = sum(block_bytes) + max(inputs), max(inputs[1:])
    grain = max(most_bytes / (N_GRAINS if equal else N_GRAINS_UNEQUAL), 1.0)
    if equal and input_bytes:  # an input is a whole number of grains: a tight plan holds many inputs and one kept block
        grain = max(input_bytes / math.ceil(input_bytes / grain), most_bytes / MOST_GRAINS)
    revolve = Revolve(
        forward=forward,
        block_grains=[round(size / grain) for size in block_bytes],
        input=[round(size / grain) for size in inputs],
        n_grains=math.ceil(most_bytes / grain),
        equal=equal,
    )
    return NestedChain(
        forecaster=forecaster,
        chain=chain,
        revolve=revolve,
        step_cost=candidates.step_cost,
        cost_unit=candidates.cost_unit,
    )


def _bytes_of(replay: Replay, chain: Fqns) -> tuple[list[int], list[int]]:
    """Bytes that each block adds if it is kept, and bytes of its inputs."""
    inputs, block_bytes = list[set[int]](), list[set[int]]()
    for fqn in chain:
        call = next(iter(saved_by_calls(replay, (fqn,), stops_early=True)), None)
        inputs.append(set(call.inputs) if call else set())
        block_bytes.append(set(call.entries.tolist()) if call else set())
    for saved, following in zip(block_bytes, inputs[1:]):
        saved |= following

    def size(entries: set[int]) -> int:
        return sum(int(replay.size[entry]) for entry in entries)

    return list(map(size, block_bytes)), list(map(size, inputs))
