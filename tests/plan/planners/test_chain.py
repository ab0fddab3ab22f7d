"""A plan of a chain is held against every way to cut it into segments, and against segments made by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec
import pytest

from explorer.errors import BadInput
from explorer.plan.planners.chain import ChainProgram
from explorer.plan.planners.planner import Planner
from explorer.plan.planners.program import Limits
from explorer.plan.planners.solver import TOLERANCE
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import MeasuredBlock, Measurement, ModelGraph, ModelRef, RunSpec, Samples, Times
from explorer.record.policy import Policy, Unit
from tests.graphs import block, graph_of
from tests.view.builders import HOST, MIB, Book

KIB = 1024


@dataclass(frozen=True)
class Size:
    """Of one block: bytes that it saves for itself, its output (which the next block saves as well), and its time."""

    saved: int = 0
    output: int = 1024 * KIB
    ms: float = 1.0


def chain_of(
    sizes: Sequence[Size], *, inner: int = 0, skips: bool = False, loss: int = 4
) -> tuple[ModelGraph, Measurement]:
    """A keep-all step of a chain; `inner`: modules inside each block that save what the block saves for itself.

    With `skips` every block is also given what the block before the last returned. The loss takes `loss` bytes.
    """
    names = [f"body.{i}" for i in range(len(sizes))]
    book = Book()
    outputs = [book.hold("input", "", sizes[0].output)]
    book.phase("forward")
    saved: list[list[int]] = []
    for name, size in zip(names, sizes):
        first = book.tick
        scratch = book.alloc("temporary", name, size.output)
        saved.append([])
        for part in _parts(name, inner) or [name]:
            if size.saved:
                saved[-1].append(book.alloc("saved activation", part, size.saved // max(inner, 1)))
            if inner:
                book.calls.append((part, book.tick - 1, book.tick, (scratch,), ()))
        outputs.append(book.alloc("saved activation", name, size.output, "aten::tanh"))
        book.free(scratch)
        book.calls.append(
            (name, first, book.tick, (*outputs[-3:-2], outputs[-2]) if skips else (outputs[-2],), outputs[-1:])
        )
    scored = book.alloc("saved activation", "", loss)
    book.phase("backward")
    gradient = book.alloc("temporary", "", sizes[-1].output)
    book.free(scored)
    for i, (name, size) in reversed(list(enumerate(zip(names, sizes)))):
        before = book.alloc("temporary", name, size.output)
        for entry in (gradient, outputs[i + 1], *saved[i]):
            book.free(entry)
        gradient = before
    book.free(gradient)
    return _graph(names, sizes, inner=inner), _run(book, names, sizes, inner=inner)


def _parts(name: str, inner: int) -> list[str]:
    return [f"{name}.act{i}" for i in range(inner)]


def _graph(names: Sequence[str], sizes: Sequence[Size], *, inner: int) -> ModelGraph:
    blocks = [block("", "Net"), block("body", "ModuleList", n_calls=0)]
    for i, (name, size) in enumerate(zip(names, sizes)):
        one = block(name, "B", follows=names[i - 1] if i else "")
        blocks.append(msgspec.structs.replace(one, saved_bytes=size.output + size.saved))
        for part in _parts(name, inner):
            blocks.append(msgspec.structs.replace(block(part, "Act"), saved_bytes=size.saved // inner))
    return graph_of(*blocks, chain=tuple(names))


def _run(book: Book, names: Sequence[str], sizes: Sequence[Size], *, inner: int) -> Measurement:
    times = {name: size.ms for name, size in zip(names, sizes)}
    total = sum(times.values())
    times |= {part: size.ms / (2 * inner + 1) for name, size in zip(names, sizes) for part in _parts(name, inner)}
    blocks = [
        MeasuredBlock(
            fqn=fqn, n_forward=1, n_recompute=0, saved_after_forward_bytes=0, at_peak_bytes=0, forward_flops=100,
            recompute_flops=0, backward_flops=200, forward=Samples(ms=(ms,) * 3),
        )
        for fqn, ms in {"": total, "body": total, **times}.items()
    ]  # fmt: skip
    return Measurement(
        spec=RunSpec(model=ModelRef(target="tests:chain"), optimizer="none"),
        environment=HOST,
        allocations=book.close(),
        phases=tuple(book.spans),
        blocks=tuple(blocks),
        times=Times(clock="process CPU time", step=Samples(ms=(3 * total,) * 3), forward=Samples(ms=(total,) * 3)),
        loss=1.0,
    )


def partitions(n: int, first: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Every way to keep each block from `first` on or to recompute it in a segment of neighbours."""
    if first == n:
        yield []
        return
    yield from partitions(n, first + 1)
    for end in range(first + 1, n + 1):
        yield from ([(first, end), *rest] for rest in partitions(n, end))


def policy_of(segments: Sequence[tuple[int, int]]) -> Policy:
    return Policy(units=tuple(Unit(blocks=tuple(f"body.{i}" for i in range(*segment))) for segment in segments))


def points(run: Measurement, graph: ModelGraph, policies: Iterable[Policy]) -> list[tuple[int, float]]:
    """Peak and cost, a share of the step, of each policy by the forecast."""
    forecaster = Forecaster(run, graph)
    forecasts = [forecaster.forecast(policy) for policy in policies]
    return [(one.step_peak_bytes or 0, (one.time_ratio or 0.0) - 1) for one in forecasts]


def is_the_best_of(planner: Planner, every: Sequence[tuple[int, float]], n_blocks: int) -> None:
    lowest, highest = min(peak for peak, _ in every), planner.keep_all_bytes
    assert planner.floor().certificate.n_segments == n_blocks * (n_blocks - 1) // 2, "every stretch is a candidate"
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        budget = round(lowest + share * (highest - lowest))
        plan = planner.within(budget)
        best = min(cost for peak, cost in every if peak <= budget)
        assert plan.step_peak_bytes <= budget
        assert plan.extra_cost / plan.step_cost <= best * (1 + 1e-6) + 1e-9, "a cheaper choice fits"
        assert plan.certificate.bound / plan.step_cost <= best * (1 + 1e-6) + 1e-9, "what is called proven is beaten"
        assert plan.certificate.gap <= 1e-5
    with pytest.raises(BadInput, match="o policy"):
        planner.within(lowest - 1)
    floor = planner.floor()
    assert floor.certificate.bound - 1 <= lowest == floor.step_peak_bytes
    for share in (0.0, 0.1, 0.2, 0.4):
        plan = planner.least_memory(share)
        assert plan.step_peak_bytes == min(peak for peak, cost in every if cost <= share + 1e-9)


def unequal(n: int, seed: int, *, saved: int = 0) -> list[Size]:
    dice = random.Random(seed)
    return [
        Size(
            saved=dice.randint(saved // 4, saved) * KIB, output=dice.randint(100, 2000) * KIB, ms=dice.uniform(0.5, 3.0)
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    "sizes", [[Size()] * 7, unequal(7, seed=2, saved=4000)], ids=["equal", "unequal and saving more"]
)
def test_no_partition_into_segments_beats_the_plan(sizes: list[Size]) -> None:
    graph, run = chain_of(sizes)
    is_the_best_of(
        Planner(run, graph, nested=False), points(run, graph, map(policy_of, partitions(len(sizes)))), len(sizes)
    )


@pytest.mark.parametrize(("skips", "loss"), [(False, 4), (False, 20 * MIB), (True, 4)])
def test_the_bound_of_a_chain_is_the_best_partition_and_below_it_where_bytes_are_not_constant(
    *, skips: bool, loss: int
) -> None:
    """Whatever the program found. At each peak that a partition has, and a byte below it; the loss may be the peak."""
    sizes = unequal(6, seed=5, saved=2000)
    graph, run = chain_of(sizes, skips=skips, loss=loss)
    planner, every = Planner(run, graph, nested=False), points(run, graph, map(policy_of, partitions(6)))
    program = planner._programs[0]
    assert isinstance(program, ChainProgram) and program.is_exact is not skips
    lowest = min(peak for peak, _ in every)
    for budget in sorted({peak - less for peak, _ in every for less in (0, 1)})[::3]:
        best = min((cost for peak, cost in every if peak <= budget), default=math.inf) * planner.candidates.step_cost
        solution = program.solve(Limits(budget_bytes=budget))
        assert program.bound <= best * (1 + 1e-9) and (skips or program.bound >= best * (1 - 1e-4)), budget
        assert (solution is not None) >= (math.isfinite(best) and not skips)
        if solution is not None:
            assert program.peak(solution.chosen) <= budget and solution.bound == min(program.bound, solution.value)
    bound, _ = program._least_budget(math.inf, ends=math.inf)  # without the limit of time
    assert program.lowest_bytes() <= bound <= lowest and (skips or bound == lowest)


def test_no_choice_of_segments_and_of_modules_beats_the_plan() -> None:
    """A block may also be kept but for the module inside it, or have it recomputed again inside."""
    graph, run = chain_of(unequal(4, seed=1, saved=3000), inner=1)
    policies = []
    for segments in partitions(4):
        alone = {first for first, end in segments if end - first == 1}
        free = sorted(
            {*range(4), *alone} - {i for first, end in segments if end - first > 1 for i in range(first, end)}
        )
        for taken in itertools.product((False, True), repeat=len(free)):
            inside = [Unit(blocks=(f"body.{i}.act0",)) for i, one in zip(free, taken) if one]
            policies.append(Policy(units=(*policy_of(segments).units, *inside)))
    is_the_best_of(Planner(run, graph, nested=False), points(run, graph, policies), 4)


@pytest.mark.parametrize(("n", "seed"), [(6, 3), (8, 0)])
def test_a_plan_of_a_chain_with_skips_costs_no_more_than_the_best_partition_and_proves_no_more(
    n: int, seed: int
) -> None:
    """What later places hold is not constant there: the chain's program alone misses plans at half of a step's cost."""
    graph, run = chain_of(unequal(n, seed=seed, saved=2000), skips=True)
    planner, every = Planner(run, graph, nested=False), points(run, graph, map(policy_of, partitions(n)))
    lowest, highest = min(peak for peak, _ in every), planner.keep_all_bytes
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        plan = planner.within(budget := round(lowest + share * (highest - lowest)))
        best = min(cost for peak, cost in every if peak <= budget)
        assert plan.step_peak_bytes <= budget and plan.extra_cost / plan.step_cost <= best * (1 + 1e-6) + 1e-9
        assert plan.certificate.bound / plan.step_cost <= best * (1 + 1e-6) + 1e-9
    assert planner.floor().step_peak_bytes == lowest


def test_a_plan_among_many_equal_choices_is_proven() -> None:
    """Answers above the budget bring rows. To forbid one answer after another would never end: many are equal."""
    graph, run = chain_of([Size(saved=4000 * KIB, output=1700 * KIB)] * 14, skips=True)
    names = [f"body.{i}" for i in range(14)]
    planner = Planner(run, graph, among=[*names, *pairwise(names)], seconds=60)
    assert planner.within(round(0.427 * planner.keep_all_bytes)).certificate.gap <= TOLERANCE


BY_HAND = ([17], [11, 10], [9, 9, 8], [8, 8, 5, 6, 4], [2] * 16, [5] * 6)
"""Lengths of segments from the front."""


def by_hand(lengths: Sequence[int]) -> Policy:
    return policy_of(list(pairwise(accumulate(lengths, initial=0))))


@pytest.mark.parametrize(
    ("n", "inner", "lengths"), [(32, 0, BY_HAND), (32, 6, BY_HAND[1:3])], ids=["few modules", "many modules"]
)
def test_a_chain_of_equal_blocks_is_planned_at_least_as_well_as_by_hand(
    n: int, inner: int, lengths: tuple[list[int], ...]
) -> None:
    graph, run = chain_of([Size(saved=512 * KIB if inner else 0)] * n, inner=inner)
    planner, every = Planner(run, graph, nested=False), points(run, graph, map(by_hand, lengths))
    for peak, cost in every:
        plan = planner.within(peak)
        assert plan.step_peak_bytes <= peak
        assert plan.extra_cost / plan.step_cost <= cost * (1 + 1e-6)
        assert plan.certificate.bound <= plan.extra_cost * (1 + 1e-6)
    floor = planner.floor()
    assert floor.step_peak_bytes <= min(peak for peak, _ in every)
    assert f"{n * (n - 1) // 2} segments of up to {n} blocks" in floor.certificate.scope


@pytest.mark.parametrize("share", [0.75, 0.5, 0.4])
def test_no_cut_by_hand_of_a_long_chain_is_cheaper(share: float) -> None:
    """All lengths of 96 blocks are too many for one program; those near its plan are offered to the next."""
    n_blocks = 96
    graph, run = chain_of([Size(saved=8 * MIB, output=MIB)] * n_blocks)
    planner, forecaster = Planner(run, graph), Forecaster(run, graph)
    budget = int(planner.keep_all_bytes * share)

    def cost(ends: tuple[int, ...]) -> float:
        forecast = forecaster.forecast(policy_of(list(itertools.pairwise((0, *ends)))))
        assert forecast.step_peak_bytes is not None and forecast.time_ratio is not None
        return forecast.time_ratio if forecast.step_peak_bytes <= budget else math.inf

    equal = (tuple(range(length, n * length + 1, length)) for n in range(1, 7) for length in range(2, n_blocks // n))
    best: tuple[int, ...] = min(equal, key=cost)
    before: tuple[int, ...] = ()
    while best != before:
        before = best
        moved = ((*best[:k], best[k] + by, *best[k + 1 :]) for k in range(len(best)) for by in (-4, -2, -1, 1, 2, 4))
        best = min(
            (best, *(ends for ends in moved if list(ends) == sorted({*ends} - {0}) and ends[-1] <= n_blocks)), key=cost
        )
    plan = planner.within(budget)
    assert plan.cost_ratio <= cost(best) * (1 + 1e-6) < math.inf
    assert "of some lengths up to" in str(plan.certificate)
