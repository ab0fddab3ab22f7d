"""Budgets as people type them: what is read, what is said about the reading, and what gets one sentence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies

from explorer.errors import BadInput
from explorer.plan.budget_text import check_budget, parse_budget, parse_wish
from explorer.plan.sizes import parse_share
from explorer.record.plan import Wish
from tests.view.builders import MIB, Chain, measured

KEEP_ALL = 200 * MIB


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("60 MiB", Wish(budget_bytes=60 * MIB)), (" 1.5gib ", Wish(budget_bytes=1536 * MIB)),
        ("1,5 GiB", Wish(budget_bytes=1536 * MIB)), ("0,500 GiB", Wish(budget_bytes=512 * MIB)),
        ("123456B", Wish(budget_bytes=123456)), ("123456 bytes", Wish(budget_bytes=123456)),
        ("1e2 MiB", Wish(budget_bytes=100 * MIB)), ("60 mebibytes", Wish(budget_bytes=60 * MIB)),
        ("50 %", Wish(budget_bytes=100 * MIB)), ("50%", Wish(budget_bytes=100 * MIB)),
        ("50 percent", Wish(budget_bytes=100 * MIB)), ("50 % of the peak", Wish(budget_bytes=100 * MIB)),
        ("120 %", Wish(budget_bytes=240 * MIB)), ("+10 % time", Wish(more_time=0.1)), ("+10%", Wish(more_time=0.1)),
        ("10 % time", Wish(more_time=0.1)), ("10 % slower", Wish(more_time=0.1)), ("+0 % time", Wish(more_time=0.0)),
    ],
)  # fmt: skip
def test_a_budget_with_one_meaning_is_read_without_a_word(text: str, wish: Wish) -> None:
    assert parse_wish(text, KEEP_ALL) == wish


@pytest.mark.parametrize(
    ("text", "n_bytes", "understood"),
    [
        ("512M", 512 * MIB, "512.0 MiB, taking 1 M for 1 MiB"), ("1 g", 1024 * MIB, "1.00 GiB, taking 1 g for 1 GiB"),
        ("512Mi", 512 * MIB, "512.0 MiB, taking 1 Mi for 1 MiB"),
        ("60mb", 60 * MIB, "60.0 MiB, taking 1 mb for 1 MiB"),
        ("0.06 GB", int(0.06 * 2**30), "61.4 MiB, taking 1 GB for 1 GiB"),
        ("1.5 GB", 1536 * MIB, "1.50 GiB, taking 1 GB for 1 GiB"),
        ("60 megabytes", 60 * MIB, "60.0 MiB, taking 1 megabytes for 1 MiB"),
        ("1e9", 10**9, "1,000,000,000 bytes, 953.7 MiB"), ("1E9", 10**9, "1,000,000,000 bytes, 953.7 MiB"),
        ("1_000_000", 10**6, "1,000,000 bytes, 976.6 KiB"), ("1,000 MiB", 1000 * MIB, "1,000.0 MiB"),
        ("1 000 MiB", 1000 * MIB, "1,000.0 MiB"), ("<60 MiB", 60 * MIB, "at most 60.0 MiB"),
        ("≤ 60 MiB", 60 * MIB, "at most 60.0 MiB"), ("At most 60 MiB", 60 * MIB, "at most 60.0 MiB"),
        ("max 1 GB", 1024 * MIB, "1.00 GiB, taking 1 GB for 1 GiB"),
        ("half", 100 * MIB, "50 % of the peak with everything kept"),
        ("a quarter", 50 * MIB, "25 % of the peak with everything kept"),
        ("1/2", 100 * MIB, "50 % of the peak with everything kept"),
    ],
)  # fmt: skip
def test_a_budget_that_leaves_room_for_doubt_says_how_it_is_read(text: str, n_bytes: int, understood: str) -> None:
    assert parse_wish(text, KEEP_ALL) == Wish(budget_bytes=n_bytes, understood=understood)


@pytest.mark.parametrize(
    "text", ["60 MiB, +10 % time", "60MiB,+10%", "+10 % time, 60 MiB", "60 MB and 10 % slower", "60 MiB +10 % time"]
)
def test_memory_and_time_may_both_be_limited(text: str) -> None:
    wish = parse_wish(text, KEEP_ALL)
    assert (wish.budget_bytes, wish.more_time) == (60 * MIB, 0.1)
    assert "60.0 MiB" in wish.understood and wish.understood.endswith("and at most 10 % more time")


NO_BUDGETS = (
    "-3", "abc", "", " ", ",", "60", "1000000", "0.5", "-5 MiB", "\N{MINUS SIGN}5 MiB", "-20 %", "+60 MiB", "50 % MiB",
    "1e9 GiB", "1e999 MiB", "nan", "nan %", "inf", "0 %", "0 B", "0.0000001 MiB", "3/0", "0/2", "10 time", "0.9x time",
    "60 MiB please", "60 MiB or so", "60 Mbit", "60 MiB/s", "60XX", "sixty", "~60 MiB", "> 60 MiB", "at least 60 MiB",
    "60 MiB, 70 MiB", "+10 % time, +5 % time", "+99999999 % time", "201%", "1.5.5 GiB", "1e", "0x10 B",
    "\N{SUPERSCRIPT TWO}", "9" * 70, "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("text", NO_BUDGETS)
def test_what_is_no_budget_gets_one_sentence(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_wish(text, KEEP_ALL)
    assert caught.value.sentence.endswith(".") and "\n" not in caught.value.sentence
    assert caught.value.hint


@given(strategies.text(strategies.sampled_from("0123456789.,_'eE+-<>%/ MmGgiIbBxstimeandhalf"), max_size=14))
def test_any_text_is_read_or_gets_one_sentence(text: str) -> None:
    try:
        wish = parse_wish(text, KEEP_ALL)
    except BadInput as error:
        assert error.sentence.endswith(".") and error.hint
    else:
        assert wish.budget_bytes is not None or wish.more_time is not None
        assert wish.budget_bytes is None or 0 <= wish.budget_bytes <= 2**50


@pytest.mark.parametrize("number", ["60", "1000000", "0.5"])
def test_a_bare_number_is_asked_for_its_unit_with_bytes_among_the_answers(number: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_wish(number, KEEP_ALL)
    assert f"{number} bytes?" in caught.value.hint and f"{number} MiB" in caught.value.hint
    assert ("%" in caught.value.hint) == (float(number) <= 200)


def test_words_for_what_the_run_knows() -> None:
    run = msgspec.structs.replace(measured(Chain()), free_memory_bytes=1600)
    assert parse_budget("60%", 1000, run).budget_bytes == 600
    assert parse_budget("device", 1000, run).budget_bytes == 1500
    assert parse_budget("+10 % time", 1000, run) == Wish(more_time=0.1)
    own = msgspec.structs.replace(run, origin="recorded")
    assert own.allocations is not None
    assert parse_budget("device", 1000, own).budget_bytes == 1500 + own.allocations.held_bytes[-1]
    assert parse_budget(1234, 1000, run).budget_bytes == 1234
    for wrong in (*NO_BUDGETS, 0, -1):
        with pytest.raises(BadInput):
            parse_budget(wrong, 1000, run)
        if isinstance(wrong, str):
            with pytest.raises(BadInput):
                check_budget(wrong)
    with pytest.raises(BadInput, match="does not say what its device had free"):
        parse_budget("device", 1000, measured(Chain()))
    with pytest.raises(BadInput, match="not predicted for a card"):
        parse_budget("Card", 1000, run)
    assert check_budget("card").card and not check_budget("device").card
    assert parse_share("+10%") == parse_share("+10 % time") == pytest.approx(0.1)
    with pytest.raises(BadInput, match="is not a share"):
        parse_share("10")
