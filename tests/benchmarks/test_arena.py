"""The arena: every planner takes part on a chain, and Rotor's program is checked against every schedule there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rotor import ChainSchedule, HeterogeneousChain, Piece, cheapest_schedule
from benchmarks.arena import OURS, PLANNERS, Trial, ratio_interval, standing, trials
from explorer.record import ModelRef, RunSpec
from explorer.record.measurement import Samples
from explorer.record.policy import Policy

SMALL = {"n_layers": 6, "width": 16, "batch": 256, "dropout": 0.0}


@pytest.mark.slow
def test_every_planner_runs_on_a_chain_with_equal_gradients() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/mlp.py", arguments=SMALL), n_repeats=2)
    keep_all, results = trials(spec, (0.9,), list(PLANNERS), 2)
    assert len(keep_all.ms) == 2 and {trial.planner for trial in results} == set(PLANNERS)
    ran = [trial for trial in results if trial.policy is not None]
    assert {OURS, "greedy", "rotor"} <= {trial.planner for trial in ran}
    assert {trial.verdict for trial in ran} == {"bitwise equal"}
    for trial in ran:
        assert trial.peak_bytes == pytest.approx(trial.predicted_bytes, rel=0.001)
        assert len(trial.steps.ms) == 2


def trial(policy: str, ms: float, peak: int = 8, verdict: str = "bitwise equal") -> Trial:
    steps = Samples(ms=tuple(ms + 0.01 * i for i in range(9)))
    return Trial("x", 0.5, 10, Policy.recompute([policy]), peak_bytes=peak, verdict=verdict, steps=steps)


def test_a_rival_beats_only_within_the_budget_with_equal_gradients_and_beyond_doubt() -> None:
    mine = trial("a", 10.0)
    assert standing(mine, trial("b", 9.0)) == "beaten"
    assert standing(mine, trial("b", 11.0)) == "ahead"
    assert standing(mine, trial("a", 9.0)) == "ahead", "the same policy"
    assert standing(mine, trial("b", 9.0, peak=11)) == "ahead", "over the budget"
    assert standing(mine, trial("b", 9.0, verdict="different")) == "ahead"
    assert standing(trial("a", 10.0, peak=11), trial("b", 12.0)) == "beaten"
    few = trial("b", 9.0)
    few.steps = Samples(ms=few.steps.ms[:4])
    assert standing(mine, few) == "undecided"


@pytest.mark.parametrize("n", [6, 8, 9, 12, 15, 50])
def test_an_interval_of_ratios_ends_where_the_sign_test_would_begin_to_doubt(n: int) -> None:
    interval = ratio_interval(Samples(ms=tuple(float(i) for i in range(n, 0, -1))), Samples(ms=(1.0,) * n), 0.95)
    assert interval is not None
    k = round(interval[0])
    assert interval == (k, n + 1 - k)
    doubt = [sum(math.comb(n, heads) for heads in range(most + 1)) / 2 ** (n - 1) for most in (k - 1, k)]
    assert doubt[0] <= 0.05 < doubt[1], "two-sided sign test"


def test_five_pairs_bound_nothing() -> None:
    assert ratio_interval(Samples(ms=(1.0,) * 5), Samples(ms=(1.0,) * 5), 0.95) is None
    assert ratio_interval(Samples(), Samples(), 0.95) is None


Tree = tuple[Piece, ...]


@st.composite
def chains(draw: st.DrawFn, most: int = 4) -> HeterogeneousChain:
    n = draw(st.integers(1, most))
    sizes = [draw(st.integers(1, 6)) for _ in range(n)]
    return HeterogeneousChain(
        forward_ms=tuple(float(draw(st.integers(1, 9))) for _ in range(n)),
        saved_bytes=tuple(size + draw(st.integers(0, 9)) for size in sizes),
        output_bytes=tuple(sizes),
    )


def schedules(first: int, last: int, *, nested: bool) -> Iterator[Tree]:
    """Every way to part first..last into kept blocks and pieces; the last is kept: backward begins with it."""
    if first == last:
        yield ()
        return
    yield from schedules(first + 1, last, nested=nested)
    for end in range(first + 1, last + 1):
        insides = schedules(first, end - 1, nested=True) if nested else iter([()])
        for inside, rest in itertools.product(insides, list(schedules(end, last, nested=nested))):
            yield (Piece(first=first, end=end, inside=inside), *rest)


def extra_ms(chain: HeterogeneousChain, tree: Tree) -> float:
    return sum(sum(chain.forward_ms[p.first : p.end]) + extra_ms(chain, p.inside) for p in tree)


def needs(chain: HeterogeneousChain, tree: Tree, first: int, last: int) -> int:
    """Most bytes held beside the input of `first`, step by step, with the paper's terms. `last` is the last block;
    behind the whole chain stands the loss, which holds nothing."""
    output, saved = (*chain.output_bytes, 0), (*chain.saved_bytes, 0)
    held, most, at = 0, 0, first
    pieces = {piece.first: piece for piece in tree}
    while at <= last:
        gradient = output[last]
        if at in pieces:
            piece = pieces[at]
            pairs = [output[i - 1] + output[i] for i in range(at + 1, last)]
            most = max(most, held + gradient + max(output[at], *pairs, 0))
            most = max(most, held + needs(chain, piece.inside, piece.first, piece.end - 1))
            held += output[piece.end - 1]
            at = piece.end
        else:
            most = max(most, held + saved[at] + max(output[at], gradient))
            held += saved[at]
            at += 1
    return most


@pytest.mark.parametrize("nested", [True, False])
@given(chain=chains(), memory=st.integers(1, 60))
def test_no_schedule_is_cheaper_and_none_fits_where_it_finds_none(
    nested: bool, chain: HeterogeneousChain, memory: int
) -> None:
    n = len(chain.forward_ms)
    every = [(extra_ms(chain, tree), tree) for tree in schedules(0, n, nested=nested)]
    least = min((cost for cost, tree in every if needs(chain, tree, 0, n) <= memory), default=math.inf)
    schedule = cheapest_schedule(chain, memory, nested=nested, n_slots=memory)
    assert (math.inf if schedule is None else extra_ms(chain, schedule.pieces)) == pytest.approx(least)
    if schedule is not None:
        assert needs(chain, schedule.pieces, 0, n) <= memory
        assert nested or not schedule.is_nested


@given(chain=chains())
def test_where_all_fits_nothing_runs_again_and_where_nothing_fits_there_is_no_schedule(
    chain: HeterogeneousChain,
) -> None:
    plenty = 4 * (sum(chain.saved_bytes) + sum(chain.output_bytes))
    assert cheapest_schedule(chain, plenty, n_slots=plenty) == ChainSchedule(pieces=())
    assert cheapest_schedule(chain, 0) is None


def test_coarse_slots_round_up_so_no_plan_breaks_the_limit() -> None:
    chain = HeterogeneousChain(forward_ms=(1.0,) * 8, saved_bytes=(101,) * 8, output_bytes=(10,) * 8)
    for memory in range(150, 900, 50):
        schedule = cheapest_schedule(chain, memory, n_slots=50)
        assert schedule is None or needs(chain, schedule.pieces, 0, 8) <= memory
