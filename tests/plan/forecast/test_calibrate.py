"""A whole step that was measured moves what is foretold of others, the more the surer it is."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.forecast.calibrate import TimedStep, calibrated
from explorer.record.plan import Forecast

FORETOLD = Forecast(time_ratio=1.2, time_ratio_spread=0.1)


def told(*seen: TimedStep, foretold: Forecast = FORETOLD) -> tuple[float, float]:
    one = calibrated(foretold, seen)
    assert one.time_ratio is not None and one.time_ratio_spread is not None
    return one.time_ratio, one.time_ratio_spread


def test_steps_that_took_twice_as_much_again_say_that_others_will() -> None:
    sure, shaky = (told(TimedStep(1.4, 1.8, error))[0] for error in (0.001, 0.5))
    assert 1.35 < sure <= 1.4 and 1.2 < shaky < 1.25
    assert told(*[TimedStep(1.4, 1.8, 0.02)] * 3)[1] < told(TimedStep(1.4, 1.8, 0.02))[1], (
        "three runs draw it in further"
    )


def test_what_says_nothing_moves_nothing() -> None:
    assert told() == told(TimedStep(1.0, 1.1, 0.01)) == (1.2, 0.1)
    assert calibrated(Forecast(), [TimedStep(1.4, 1.8, 0.01)]) == Forecast()


def test_many_small_units_are_less_known_by_a_step_of_few_large_ones() -> None:
    """Experts: 24 calls where the step that was seen had 6. The same share of calls says as much as none on both."""
    few, many = (msgspec.structs.replace(FORETOLD, time_ratio_of_calls=calls) for calls in (0.01, 0.08))
    large, small = TimedStep(1.4, 1.4, 0.01, calls=0.02), TimedStep(1.4, 1.4, 0.01, calls=0.16)
    assert told(large, foretold=few)[0] == told(large, foretold=many)[0], "the middle stays"
    assert told(large, foretold=many)[1] > 1.5 * told(large, foretold=few)[1]
    assert told(small, foretold=many) == told(large, foretold=few) == told(TimedStep(1.4, 1.4, 0.01))


def test_steps_that_lie_apart_say_that_others_will() -> None:
    alike = told(TimedStep(1.4, 1.6, 0.01), TimedStep(1.2, 1.3, 0.01))
    apart = told(TimedStep(1.4, 1.8, 0.01), TimedStep(1.2, 1.2, 0.01))
    assert apart[1] > 1.5 * alike[1]


SEEN = st.builds(TimedStep, st.floats(1.01, 3), st.floats(0.9, 4), st.floats(0, 0.3), st.floats(0, 1))


@given(st.lists(SEEN, min_size=1, max_size=4))
def test_no_policy_is_foretold_to_be_faster_than_keeping_everything(seen: list[TimedStep]) -> None:
    ratio, spread = told(*seen)
    assert ratio >= 1 and spread > 0
