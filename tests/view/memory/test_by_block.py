"""Blocks stacked at any drawn point are the total, to the byte; what runs again lies on top."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings

from explorer.record import ROLES, Allocations, Measurement
from explorer.view.memory.by_block import AGAIN, MOST_BANDS, REST, by_block
from explorer.view.memory.timeline import NO_TIMELINE
from tests.view.builders import MIB, Chain, logs, measured, runs


def stack_of(run: Measurement) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Heights of the bands in bytes, those of the total line, and the bands' names."""
    fig = by_block(run).figure
    bands = [trace for trace in fig.data if trace.stackgroup]
    total = next(trace for trace in fig.data if trace.name == "total")
    unit = {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[fig.layout.yaxis.title.text[-4:-1]]
    return np.array([band.y for band in bands]) * unit, np.array(total.y) * unit, [band.name for band in bands]


@settings(max_examples=12, deadline=None)
@given(runs())
def test_bands_add_up_to_the_total(run: Measurement) -> None:
    bands, total, _ = stack_of(run)
    assert np.rint(bands).sum(axis=0).tolist() == np.rint(total).tolist()
    assert np.rint(total).max() == run.step_peak_bytes


@settings(max_examples=12, deadline=None)
@given(logs())
def test_bands_add_up_for_any_order_of_events(log: Allocations) -> None:
    if log.n_ticks and max(log.held_bytes):
        bands, total, _ = stack_of(msgspec.structs.replace(measured(), allocations=log, phases=()))
        assert np.rint(bands).sum(axis=0).tolist() == np.rint(total).tolist()


def test_what_stays_lies_at_the_bottom_blocks_in_order_recompute_on_top() -> None:
    names = stack_of(measured(Chain(n_blocks=4), recompute=[1]))[2]
    blocks = [name for name in names if name.startswith("layers.")]
    assert blocks == sorted(blocks) and len(blocks) == 4
    assert names[0] == REST and names[-1] == AGAIN
    assert AGAIN not in stack_of(measured(Chain(n_blocks=4)))[2]


def test_recompute_of_every_block_is_one_band() -> None:
    run = measured(Chain(n_blocks=4), recompute=[0, 2])
    log = run.allocations
    assert log is not None
    bands, _, names = stack_of(run)
    again = [i for i, role in enumerate(log.role) if role == ROLES.index("recomputed")]
    assert len({log.block[i] for i in again}) >= 2
    most = max(sum(log.n_bytes[i] for i in again if log.born[i] <= t < log.died[i]) for t in range(log.n_ticks + 1))
    assert np.rint(bands[names.index(AGAIN)].max()) == most


def test_a_deep_model_shares_bands() -> None:
    names = stack_of(measured(Chain(n_blocks=60)))[2]
    assert len(names) <= MOST_BANDS + 3 and any(" to " in name for name in names)


def test_words_and_rows_say_the_same_peak() -> None:
    run = measured(Chain(n_blocks=4), recompute=[1])
    chart = by_block(run)
    assert sum(row["at the peak (bytes)"] for row in chart.rows()) == run.step_peak_bytes
    assert chart.alt.startswith("Stacked area chart of bytes by block, recompute on top. At the peak")
    bare = by_block(msgspec.structs.replace(run, allocations=None))
    assert bare.alt == NO_TIMELINE and list(bare.rows()) == [{"band": NO_TIMELINE}]
