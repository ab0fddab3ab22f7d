"""The lists of actions read as in the papers."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import integers

from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.orders import gpipe, looped_bfs, one_f_one_b


@given(n_ranks=integers(1, 6), n_microbatches=integers(1, 9))
def test_one_f_one_b_keeps_few_in_flight(n_ranks: int, n_microbatches: int) -> None:
    for rank, row in enumerate(one_f_one_b(n_ranks, n_microbatches)):
        flying = most = 0
        for action in row:
            flying += 1 if action.kind == "F" else -1
            most = max(most, flying)
        assert most == min(n_microbatches, n_ranks - rank)


def test_the_lists_read_as_in_the_papers() -> None:
    assert format_rows(gpipe(2, 2)) == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    assert format_rows(one_f_one_b(2, 3)) == (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"),
        ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"),
    )
    assert format_rows(looped_bfs(1, 2)) == (("0F0", "0F1", "1F0", "1F1", "1B1", "1B0", "0B1", "0B0"),)
