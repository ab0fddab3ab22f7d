"""What one percent of the step's FLOPs buys: MiB of the peak, either way."""

from __future__ import annotations

import pytest

from explorer.record.plan import Price


def test_without_flops_a_price_has_no_rate() -> None:
    free = Price(blocks=("a",), toggle="recompute", peak_bytes=1, peak_change_bytes=-1, share_of_step_flops=None)
    assert free.mib_per_percent is None


@pytest.mark.parametrize(("toggle", "change", "rate"), [("recompute", -50, 10.0), ("keep", 50, 10.0), ("keep", 0, 0.0)])
def test_the_rate_is_positive_whichever_way_the_toggle_goes(toggle: str, change: int, rate: float) -> None:
    price = Price(
        blocks=("a",), toggle=toggle, peak_bytes=1, peak_change_bytes=change * 2**20, share_of_step_flops=0.05
    )
    assert price.mib_per_percent == pytest.approx(rate)
