"""A step at a size that nobody ran: on the textbook chain it is the step itself."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.errors import BadInput
from explorer.plan.forecast.any_size import at_size, largest
from explorer.record import Failure, Measurement
from tests.view.builders import Chain, measured


def at_batch(batch: int, chosen: frozenset[int] = frozenset(), *, squared: int = 0) -> Measurement:
    """Bytes grow with the batch, parameters do not; `squared` bytes of what is saved grow with its square."""
    saved = 40_000 * batch + squared * batch**2
    chain = Chain(saved=saved, output=3_000 * batch, scratch=9_000 * batch, parameters=500_000, flops=10**6 * batch)
    return measured(chain, chosen)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(1, 6), min_size=2, max_size=3), st.integers(1, 500), st.frozensets(st.integers(0, 5)))
def test_any_batch_of_the_textbook_chain_under_any_policy(sizes: set[int], batch: int, chosen: frozenset[int]) -> None:
    real = at_batch(batch, chosen)
    foretold = at_size({size: at_batch(size, chosen) for size in sizes}, batch, real.spec)
    assert foretold.event_by_event and foretold.step_peak_bytes == real.step_peak_bytes
    told = foretold.measurement
    assert told is not None and (told.origin, told.times) == ("predicted", None)
    assert told.saved_after_forward_bytes == real.saved_after_forward_bytes
    assert told.total_flops == real.total_flops


def test_what_grows_with_the_square_takes_three_runs() -> None:
    real = at_batch(50, squared=7)
    runs = {size: at_batch(size, squared=7) for size in (2, 3, 5)}
    assert at_size(runs, 50, real.spec).step_peak_bytes == real.step_peak_bytes
    del runs[5]
    assert at_size(runs, 50, real.spec).step_peak_bytes != real.step_peak_bytes


def test_runs_that_differ_in_their_events_give_a_rougher_figure_and_no_timeline() -> None:
    runs = {2: at_batch(2), 4: at_batch(4, frozenset({0}))}
    foretold = at_size(runs, 6, runs[2].spec)
    peaks = [run.step_peak_bytes for run in runs.values()]
    assert peaks[0] is not None and peaks[1] is not None
    assert (foretold.event_by_event, foretold.measurement) == (False, None)
    assert foretold.step_peak_bytes == 2 * peaks[1] - peaks[0]


def test_one_run_tells_no_size_nor_does_one_that_was_cut_short() -> None:
    run = at_batch(2)
    cut = msgspec.structs.replace(at_batch(4), failure=Failure(kind="out of memory", sentence="It was refused."))
    for runs in ({2: run}, {2: run, 4: cut}):
        with pytest.raises(BadInput, match="from two finished runs"):
            at_size(runs, 8, run.spec)


@given(st.integers(0, 10_000), st.integers(1, 5_000))
def test_the_largest_size_that_fits(limit: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    assert largest(fits, most=most) == min(limit, most)
    assert len(asked) <= 2 * (limit + 1).bit_length() + 1
