"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from explorer.errors import BadInput
from explorer.plan.sizes import mib, mib_up, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1.5GiB", 1610612736),
        ("800MiB", 838860800),
        ("123456B", 123456),
        ("123456", 123456),
        (" 64 kib ", 65536),
        (".5KiB", 512),
        ("1TiB", 2**40),
        ("0", 0),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@given(integers(0, 2**62))
def test_whole_bytes_are_exact(n_bytes: int) -> None:
    assert parse_bytes(f"{n_bytes}B") == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.5GB", "12MB", "-1", "1e9", "1 2", "1.2.3GiB", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a size"):
        parse_bytes(text)


def test_a_size_is_written_in_the_unit_that_people_read() -> None:
    assert mib(int(12_856.5 * 2**20)) == "12.56 GiB" and mib(2**20) == "1.0 MiB" and mib(1) == "1 B"


@given(integers(0, 2**45))
def test_what_is_advised_is_no_less_than_what_is_needed(n_bytes: int) -> None:
    assert parse_bytes(mib_up(n_bytes).replace(",", "")) >= n_bytes - 1


@pytest.mark.parametrize(("text", "instead"), [("60 mb", "60MiB"), ("1.5GB", "1.5GiB")])
def test_a_decimal_unit_is_refused_with_what_to_write(text: str, instead: str) -> None:
    with pytest.raises(BadInput, match="not a size") as refused:
        parse_bytes(text)
    assert f"write {instead}." in refused.value.hint and parse_bytes(instead)
