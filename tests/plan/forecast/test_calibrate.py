"""A whole step that was measured moves what is foretold of others, the more the surer it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.forecast.calibrate import TimedStep, calibrated
from explorer.record.forecast import Forecast

FORETOLD = Forecast(time_ratio=1.2, time_ratio_spread=0.1)


def told(*seen: TimedStep) -> tuple[float, float]:
    one = calibrated(FORETOLD, seen)
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


@given(st.lists(st.builds(TimedStep, st.floats(1.01, 3), st.floats(0.9, 4), st.floats(0, 0.3)), min_size=1, max_size=4))
def test_no_policy_is_foretold_to_be_faster_than_keeping_everything(seen: list[TimedStep]) -> None:
    ratio, spread = told(*seen)
    assert ratio >= 1 and spread > 0
