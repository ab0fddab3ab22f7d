"""Numbers are read by people: units, signs, and no zero for what nobody measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.record import Samples
from explorer.view.drawing.units import byte_axis, change, count, flop_axis, flops, mib, milliseconds, percent

MIB = 1024**2


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, "not measured"), (0, "0 MiB"), (1, "1 B"), (2048, "2.0 KiB"), (int(206.1 * MIB), "206.1 MiB"),
        (1024 * MIB, "1.00 GiB"), (1023 * MIB, "1,023.0 MiB"), (-3 * MIB, "\N{MINUS SIGN}3.0 MiB"),
        (5 * 1024**4, "5.00 TiB"),
    ],
)  # fmt: skip
def test_bytes(n_bytes: int | None, text: str) -> None:
    assert mib(n_bytes) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(None, "not measured"), (0, "0 FLOP"), (999, "999 FLOP"), (16_490_000_000, "16.49 GFLOP"), (1500, "1.50 kFLOP")],
)
def test_flops(n: int | None, text: str) -> None:
    assert flops(n) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "not measured"), (0.0, "0.0 %"), (0.217, "+22 %"), (-0.73, "\N{MINUS SIGN}73 %"), (0.0312, "+3.1 %"),
        (0.0001, "+<0.1 %"), (2.5, "+250 %"),
    ],
)  # fmt: skip
def test_signed_percent(share: float | None, text: str) -> None:
    assert percent(share, signed=True) == text


def test_times_carry_their_spread() -> None:
    assert milliseconds(Samples(ms=(10.0, 12.0, 11.0, 13.0, 12.0))) == "12.0 ± 0.5 ms"
    assert milliseconds(Samples(ms=(12.3,))) == "12.3 ms"
    assert milliseconds(Samples()) == milliseconds(None) == "not measured"


@pytest.mark.parametrize(
    ("median", "half", "text"),
    [
        (192, 0.389, "192.0 ± 0.4 ms"),
        (531, 3.32, "531 ± 3 ms"),
        (1234, 22.2, "1,234 ± 22 ms"),
        (3.4, 0.0543, "3.40 ± 0.05 ms"),
        (0.0123, 0.001, "0.012 ± 0.001 ms"),
        (100, 1e-9, "100.0000 ± 0.0000 ms"),
        (5, 0, "5 ± 0 ms"),
    ],
)
def test_median_and_spread_end_at_the_same_digit(median: float, half: float, text: str) -> None:
    quartiles = (median - half, median - half, median, median + half, median + half)
    assert milliseconds(Samples(ms=quartiles)) == text


def test_one_is_not_plural() -> None:
    assert (count(1, "tensor"), count(0, "tensor"), count(1200, "tensor")) == ("1 tensor", "0 tensors", "1,200 tensors")


def test_unknown_has_no_change() -> None:
    assert change(None, 1) is change(1, None) is change(0, 1) is None
    assert change(200, 50) == -0.75


@given(st.integers(1, 10**16))
def test_axes_never_need_powers_of_ten(largest: int) -> None:
    assert largest / byte_axis(largest)[0] > 0
    assert 1 <= largest / flop_axis(largest)[0] < 1000 or largest >= 10**18


def test_axis_units() -> None:
    assert byte_axis(200 * MIB) == (MIB, "MiB")
    assert byte_axis(80 * 1024 * MIB) == (1024 * MIB, "GiB")
    assert flop_axis(16_490_000_000) == (1e9, "GFLOP")
