"""What a summary says of a peak that no policy lowers."""

from __future__ import annotations

import pytest

from explorer.plan.memory.ledger import PLURAL
from explorer.plan.summary import LOWERED_BY, _fixed


@pytest.mark.parametrize("role", LOWERED_BY)
def test_the_largest_role_that_no_policy_lowers_is_named_with_what_does(role: str) -> None:
    text = _fixed({role: 700 << 20, "saved activation": 300 << 20, **{r: 1 << 20 for r in LOWERED_BY if r != role}})
    assert f"{PLURAL[role]} (700.0 MiB): {LOWERED_BY[role]}" in text  # type: ignore[index]
    assert "704.0 MiB of the peak" in text


@pytest.mark.parametrize("held", [{}, {"saved activation": 10, "parameter": 9}, {"temporary": 5, "recomputed": 5}])
def test_a_peak_that_a_policy_may_lower_has_no_such_sentence(held: dict[str, int]) -> None:
    assert _fixed(held) == ""
