"""Rotor's dynamic program against every schedule there is, on chains small enough to write all of them down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rotor import ChainSchedule, HeterogeneousChain, Piece, cheapest_schedule

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
