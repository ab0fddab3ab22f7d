"""Blocks stacked at any drawn point are the total, to the byte; what runs again lies on top."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings

from explorer.record import ROLES, Allocations, Measurement
from explorer.view.memory.stacked import AGAIN, MOST_BANDS, REST, by_block
from explorer.view.memory.timeline import NO_TIMELINE
from tests.view.builders import Chain, logs, measured, runs
from tests.view.memory.stacks import assert_adds_up, stack_of


@settings(max_examples=12, deadline=None)
@given(runs())
def test_bands_add_up_to_the_total(run: Measurement) -> None:
    assert_adds_up(by_block(run), run.step_peak_bytes)


@settings(max_examples=12, deadline=None)
@given(logs())
def test_bands_add_up_for_any_order_of_events(log: Allocations) -> None:
    if log.n_ticks and max(log.held_bytes):
        assert_adds_up(by_block(msgspec.structs.replace(measured(), allocations=log, phases=())), max(log.held_bytes))


def test_what_stays_lies_at_the_bottom_blocks_in_order_recompute_on_top() -> None:
    names = stack_of(by_block(measured(Chain(n_blocks=4), recompute=[1])))[2]
    blocks = [name for name in names if name.startswith("layers.")]
    assert blocks == sorted(blocks) and len(blocks) == 4
    assert names[0] == REST and names[-1] == AGAIN
    assert AGAIN not in stack_of(by_block(measured(Chain(n_blocks=4))))[2]


def test_recompute_of_every_block_is_one_band() -> None:
    run = measured(Chain(n_blocks=4), recompute=[0, 2])
    log = run.allocations
    assert log is not None
    bands, _, names = stack_of(by_block(run))
    again = [i for i, role in enumerate(log.role) if role == ROLES.index("recomputed")]
    assert len({log.block[i] for i in again}) >= 2
    most = max(sum(log.n_bytes[i] for i in again if log.born[i] <= t < log.died[i]) for t in range(log.n_ticks + 1))
    assert np.rint(bands[names.index(AGAIN)].max()) == most


def test_a_deep_model_shares_bands() -> None:
    names = stack_of(by_block(measured(Chain(n_blocks=60))))[2]
    assert len(names) <= MOST_BANDS + 3 and any(" to " in name for name in names)


def test_words_and_rows_say_the_same_peak() -> None:
    run = measured(Chain(n_blocks=4), recompute=[1])
    chart = by_block(run)
    assert sum(row["at the peak (bytes)"] for row in chart.rows()) == run.step_peak_bytes
    assert chart.alt.startswith("Stacked area chart of bytes by block, recompute on top. At the peak")
    bare = by_block(msgspec.structs.replace(run, allocations=None))
    assert bare.alt == NO_TIMELINE and list(bare.rows()) == [{"band": NO_TIMELINE}]
