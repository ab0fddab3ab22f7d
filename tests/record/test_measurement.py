"""Measurements, plans and pipeline runs: what they derive."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.record import Failure, ModelRef, Policy, RunSpec
from explorer.record.allocations import ROLES, Allocations, Ledger, LedgerCell, PhaseSpan
from explorer.record.base import column
from explorer.record.measurement import MeasuredBlock, Measurement, RecordedRanks, Samples, ratio_with_spread
from explorer.record.plan import AutoPlan, Certificate, Plan, Price
from tests.graphs import alive_at
from tests.view.builders import HOST, MIB, Chain, measured


def log_of(entries: list[tuple[int, int, int]], n_ticks: int = 12) -> Allocations:
    """(bytes, born, ticks alive) an entry."""
    n = len(entries)
    return Allocations(
        n_ticks=n_ticks,
        n_bytes=column(size for size, _, _ in entries),
        born=column(born for _, born, _ in entries),
        died=column(born + lived for _, born, lived in entries),
        role=column([0] * n),
        block=column([0] * n),
        op=column([0] * n),
        blocks=("",),
        ops=("",),
        time_ns=column(),
    )


def test_too_few_readings_have_no_figure() -> None:
    assert (Samples().median_ms, Samples().spread_ms, Samples(ms=(3.0,)).spread_ms) == (None, None, None)
    assert Samples(ms=(3.0,)).median_ms == 3.0
    assert ratio_with_spread(Samples(ms=(1.0,)), Samples(ms=(1.0,))) is None


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    assert Samples(ms=(1.0, 2.0, 3.0, 4.0, 5.0)).spread_ms == Samples(ms=(1.0, 2.0, 3.0, 4.0, 500.0)).spread_ms == 1.0


@pytest.mark.parametrize(("ms", "spread"), [((1.0, 2.0, 31.0), 15.0), ((1.0, 2.0, 3.0, 4.0), 0.75)])
def test_quartiles_begin_at_four_readings(ms: tuple[float, ...], spread: float) -> None:
    assert Samples(ms=ms).spread_ms == spread


def test_a_ratio_is_of_pairs_so_that_what_slows_both_cancels() -> None:
    assert Samples(ms=(1.0, 3.0)).spread_ms == 1.0, "quartiles of two readings would lie too near"
    assert ratio_with_spread(Samples(ms=(2.0, 20.0, 4.0)), Samples(ms=(1.0, 10.0, 2.0))) == (2.0, 0.0)
    assert ratio_with_spread(Samples(ms=(2.0, 3.0, 4.0)), Samples(ms=(1.0, 0.0, 2.0))) == (2.0, 0.0), "no division by 0"


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12), st.floats(0.1, 10))
def test_a_scaled_clock_gives_that_ratio_without_spread(ms: list[float], scale: float) -> None:
    pair = ratio_with_spread(Samples(ms=tuple(scale * one for one in ms)), Samples(ms=tuple(ms)))
    assert pair is not None and pair == (pytest.approx(scale), pytest.approx(0, abs=1e-6 * scale))


SAVED, TEMPORARY = ROLES.index("saved activation"), ROLES.index("temporary")
FAILED = Failure(kind="out of memory", sentence="full")
BLOCK = MeasuredBlock(
    fqn="", n_forward=1, n_recompute=0, saved_after_forward_bytes=5, at_peak_bytes=9, forward_flops=10,
    recompute_flops=0, backward_flops=20,
)  # fmt: skip
SPANS = (
    PhaseSpan(phase="forward", block="", first_tick=0, end_tick=4),
    PhaseSpan(phase="recompute", block="b", first_tick=4, end_tick=6),
    PhaseSpan(phase="backward", block="", first_tick=6, end_tick=13),
)
LOG = replace(
    log_of([(5, 1, 8), (3, 2, 1), (7, 5, 2)]), role=column([SAVED, TEMPORARY, TEMPORARY])
)  # 5 saved to tick 9, 3 freed within forward, 7 in the recompute
RUN = Measurement(
    spec=RunSpec(model=ModelRef(target="a.py")), environment=HOST, allocations=LOG, phases=SPANS, blocks=(BLOCK,)
)


def test_headlines_of_a_whole_run() -> None:
    headlines = RUN.headlines()
    assert (headlines["step_peak_bytes"], headlines["saved_after_forward_bytes"]) == (12, 5)
    assert headlines["peak_phase"] == "recompute"
    assert (headlines["forward_flops"], headlines["recompute_flops"], RUN.total_flops) == (10, 0, 30)
    assert headlines["complete"] is True and headlines["failed_in"] == "" and headlines["step_ms"] is None
    assert RUN.forward_end_tick == 3


def test_a_run_that_was_cut_short_says_only_what_it_held_and_where_it_ended() -> None:
    short = replace(RUN, failure=FAILED)
    headlines = short.headlines()
    assert headlines["held_peak_bytes"] == 12 and headlines["failed_in"] == "the recompute of b"
    others = set(headlines) - {"held_peak_bytes", "failed_in", "complete"}
    assert {headlines[name] for name in others} == {None}


@pytest.mark.parametrize(("n_spans", "where"), [(1, "forward"), (0, "")])
def test_where_it_ended_is_where_the_last_allocation_was_made(n_spans: int, where: str) -> None:
    log = replace(log_of([(5, 1, 8), (3, 2, 1)]), role=column([SAVED, TEMPORARY]))
    assert replace(RUN, failure=FAILED, allocations=log, phases=SPANS[:n_spans]).failed_in == where


@pytest.mark.parametrize(("born", "phase"), [(3, "forward"), (4, "the recompute of b")])
def test_a_phase_ends_before_the_tick_at_which_the_next_begins(born: int, phase: str) -> None:
    run = replace(RUN, allocations=log_of([(5, born, 1)]))
    assert replace(run, failure=FAILED).failed_in == phase
    assert run.peak_phase == phase.split()[-3 if "of" in phase else 0]


@pytest.mark.parametrize(("born", "lived", "counts"), [(3, 1, True), (4, 1, False), (2, 1, False), (2, 2, True)])
def test_what_is_saved_after_forward_is_alive_at_its_last_tick(born: int, lived: int, *, counts: bool) -> None:
    log = replace(log_of([(5, born, lived)]), role=column([SAVED]))
    assert replace(RUN, allocations=log).saved_after_forward_bytes == 5 * counts


def test_behind_the_recorded_step_a_failure_has_no_place() -> None:
    whole = (*SPANS, PhaseSpan(phase="optimizer", block="", first_tick=13, end_tick=14))
    assert replace(RUN, failure=FAILED, phases=whole).failed_in == ""


def test_without_a_timeline_every_figure_is_unknown() -> None:
    bare = replace(RUN, allocations=None, blocks=(), phases=())
    assert bare.step_peak_bytes is bare.saved_after_forward_bytes is bare.peak_phase is bare.total_flops is None


def test_the_fullest_rank_speaks_for_all() -> None:
    small, large = (
        msgspec.structs.replace(measured(Chain(saved=size * MIB)), rank=rank) for rank, size in ((0, 4), (2, 40))
    )
    ranks = RecordedRanks(ranks=(small, large), n_ranks=4, recorded_in="train.py:42, step 2")
    assert ranks.fullest is large and ranks.by_rank == {0: small, 2: large} and ranks.missing == (1, 3)
    assert ranks.spec.model.target.endswith("train.py:42, step 2") and ranks.spec.policy == large.spec.policy
    assert ranks.headlines() == {
        "n_ranks": 4, "fullest_rank": 2, "complete": True,
        "held_peak_bytes": large.held_peak_bytes, "step_peak_bytes": large.step_peak_bytes,
    }  # fmt: skip


LIVES = st.tuples(st.integers(1, 100), st.integers(0, 6), st.integers(1, 6))


@given(st.lists(LIVES, max_size=12))
def test_each_tick_holds_what_is_alive_then(entries: list[tuple[int, int, int]]) -> None:
    log = log_of(entries)
    held = [sum(log.n_bytes[i] for i in alive_at(log, tick)) for tick in range(log.n_ticks + 1)]
    assert list(log.held_bytes) == held
    assert log.peak_tick == held.index(max(held))


CELLS = st.builds(
    LedgerCell,
    role=st.sampled_from(ROLES),
    block=st.sampled_from(["", "a", "b"]),
    n_bytes=st.integers(1, 99),
    n_allocations=st.just(1),
    largest_op=st.just(""),
)


@given(st.lists(CELLS, max_size=8))
def test_both_ways_add_up(cells: list[LedgerCell]) -> None:
    ledger = Ledger(
        tick=1, phase=None, phase_block="", phase_share=None, at_block="", is_peak=False, cells=tuple(cells)
    )
    total = sum(cell.n_bytes for cell in cells)
    assert ledger.total_bytes == sum(ledger.by_role.values()) == sum(ledger.by_block.values()) == total
    assert tuple(ledger.by_role) == ROLES
    assert list(ledger.by_block.values()) == sorted(ledger.by_block.values(), reverse=True)
    assert set(ledger.by_block) == {cell.block for cell in cells}


def certificate(gap: float, n_candidates: int = 24, n_solves: int = 3) -> Certificate:
    return Certificate(bound=1.0, gap=gap, n_candidates=n_candidates, n_rows=7, n_solves=n_solves)


def test_a_sentence_names_what_could_be_chosen_and_how_deep_it_nests() -> None:
    chain = replace(certificate(0.0, 497), n_segments=496, longest_segment=32, inside_segments=False)
    assert chain.scope == "1 module and 496 segments of up to 32 blocks, nothing inside a segment"
    assert chain.scope in str(chain)
    thinned = replace(chain, n_candidates=496, n_segments=495)
    assert thinned.scope.startswith("1 module and 495 segments of some lengths up to 32 blocks, ")
    both = replace(chain, inside_segments=True, beside=chain.scope)
    assert both.scope == "1 module and 496 segments of up to 32 blocks", "the other choices are among these"
    assert (
        replace(both, n_candidates=498).scope
        == f"2 modules{both.scope[8:]}, at most one inside another, or {chain.scope}"
    )
    deep = replace(certificate(0.0), n_levels=3)
    assert deep.scope == "24 modules, at most one inside another (this plan nests 3 levels)"


@given(st.floats(min_value=1e-9, max_value=0.99))
def test_the_gap_is_never_said_smaller_than_it_is(gap: float) -> None:
    told = re.match(r"within ([\d.]+) %", str(certificate(gap)))
    assert told is not None and gap <= float(told[1]) / 100 * (1 + 1e-12) <= gap + 1.1e-4


PLAN = Plan(
    policy=Policy(), step_peak_bytes=80, baseline_step_peak_bytes=100, extra_cost=25.0, step_cost=100.0,
    cost_unit="ms", certificate=certificate(0.0),
)  # fmt: skip


def test_what_a_plan_derives() -> None:
    assert PLAN.cost_ratio == 1.25 and replace(PLAN, step_cost=0.0).cost_ratio is None
    proven = [replace(PLAN, certificate=certificate(gap)).proven for gap in (0.0, 1e-3, 2e-3)]
    assert proven == [True, True, False], "within a thousandth"


@pytest.mark.parametrize(
    ("budget", "measured", "kept"), [(100, 100, True), (100, 101, False), (100, None, False), (None, 10**12, True)]
)
def test_kept_is_measured(budget: int | None, measured: int | None, kept: bool) -> None:
    auto = AutoPlan(plan=replace(PLAN, budget_bytes=budget), measured_peak_bytes=measured, n_steps=3)
    assert auto.kept == kept
    first = str(auto).splitlines()[0]
    if kept:
        assert auto.require() is auto and "budget" not in str(auto)
    else:
        assert "budget of 100 bytes" in first and ("no peak" in first if measured is None else "101, 1 more" in first)
        with pytest.raises(BadInput, match="budget of 100 bytes"):
            auto.require()
    assert (auto.policy, auto.certificate) == (PLAN.policy, PLAN.certificate)
    assert (auto.predicted_peak_bytes, auto.predicted_time_ratio) == (80, 1.25)


@pytest.mark.parametrize(("toggle", "change", "rate"), [("recompute", -50, 10.0), ("keep", 50, 10.0), ("keep", 0, 0.0)])
def test_the_rate_is_positive_whichever_way_the_toggle_goes(toggle: str, change: int, rate: float) -> None:
    price = Price(
        blocks=("a",), toggle=toggle, peak_bytes=1, peak_change_bytes=change * 2**20, share_of_step_flops=0.05
    )
    assert price.mib_per_percent == pytest.approx(rate)
    assert replace(price, share_of_step_flops=None).mib_per_percent is None
