"""A budget as people type it is read as they mean it, and what means nothing gets one sentence."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import BadInput
from explorer.plan.planners.budget import parse_budget, parse_share, parse_wish
from explorer.record.plan import Wish
from tests.view.builders import Chain, measured

MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("60 MiB", Wish(budget_bytes=60 * MIB)),
        (" 1.5gib ", Wish(budget_bytes=1536 * MIB)),
        ("1,5 GiB", Wish(budget_bytes=1536 * MIB)),
        ("123456B", Wish(budget_bytes=123456)),
        ("50 %", Wish(budget_bytes=100 * MIB)),
        ("50%", Wish(budget_bytes=100 * MIB)),
        ("120 %", Wish(budget_bytes=240 * MIB)),
        ("+10 % time", Wish(more_time=0.1)),
        ("+10%", Wish(more_time=0.1)),
        ("10 % time", Wish(more_time=0.1)),
        ("+0 % time", Wish(more_time=0.0)),
    ],
)
def test_a_budget_is_read_as_it_is_meant(text: str, wish: Wish) -> None:
    assert parse_wish(text, 200 * MIB) == wish


@pytest.mark.parametrize(
    "text", ["-3", "abc", "0", "", "   ", "60", "-5 MiB", "-10 % time", "+60 MiB", "50 % MiB", "60 MB", "1e9 GiB",
             "nan %", "inf", "0 %", "0 MiB", "10 time", "60 MiB please", "+99999999 % time",
             "1000 %", "201%"],
)  # fmt: skip
def test_what_is_no_budget_gets_one_sentence(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_wish(text, 200 * MIB)
    assert caught.value.sentence.endswith(".") and "\n" not in caught.value.sentence
    assert caught.value.hint


def test_budgets_as_people_write_them() -> None:
    run = msgspec.structs.replace(measured(Chain()), free_memory_bytes=1600)
    assert parse_budget("1.5GiB", 1, run) == 1.5 * 2**30
    assert parse_budget("60%", 1000, run) == 600
    assert parse_budget("device", 1000, run) == 1500
    own = msgspec.structs.replace(run, origin="recorded")
    assert own.allocations is not None
    assert parse_budget("device", 1000, own) == 1500 + own.allocations.held_bytes[-1]
    assert parse_share("+10%") == pytest.approx(0.1)
    assert parse_budget(1234, 1000, run) == 1234
    for wrong in ("0%", "-5%", "much", "0B", "60", "1000%", "+10%", "+10 % time", 0, -1):
        with pytest.raises(BadInput):
            parse_budget(wrong, 1000, run)
    with pytest.raises(BadInput, match="does not say what its device had free"):
        parse_budget("device", 1000, measured(Chain()))
    with pytest.raises(BadInput, match="is not a share"):
        parse_share("10")
