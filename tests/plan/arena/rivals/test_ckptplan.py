"""The package cannot take part, and says why."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.arena.rivals.ckptplan import RIVAL
from tests.plan.arena.situations import situation


def test_where_it_cannot_plan_it_says_why() -> None:
    case = situation("unet")
    assert RIVAL.choose is not None
    with pytest.raises(BadInput, match="CUDA"):
        RIVAL.choose(case, case.keep_all_bytes)
