"""Schedules as text: what is written is what is read, and a bad cell is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import builds, integers, lists, sampled_from

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import Action, format_rows, from_csv, parse_action, parse_rows, stage_ranks, to_csv

ACTIONS = builds(Action, integers(0, 40), sampled_from("FBIW"), integers(0, 40))
ROWS = lists(lists(ACTIONS, min_size=1, max_size=9).map(tuple), min_size=1, max_size=5).map(tuple)


@given(rows=ROWS)
def test_rows_survive_csv_and_text(rows: tuple[tuple[Action, ...], ...]) -> None:
    assert from_csv(to_csv(rows)) == rows
    assert parse_rows(format_rows(rows)) == rows


def test_an_action_prints_as_torch_writes_it() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert parse_action(" 12W3 ") == Action(12, "W", 3)


def test_waiting_communication_and_overlap_are_read() -> None:
    rows = from_csv("0F0,,0SEND_F0,(0F1;1B0)OVERLAP_F_B,0REDUCE_GRAD\n,1RECV_F0,1F0\n")
    assert format_rows(rows) == (("0F0", "0F1", "1B0"), ("1F0",))


def test_every_bad_cell_is_named_at_once() -> None:
    with pytest.raises(InvalidPlan) as caught:
        parse_rows([["0F0", "0X1"], ["F1"]])
    assert "'0X1' (rank 0, cell 1)" in str(caught.value)
    assert "'F1' (rank 1, cell 0)" in str(caught.value)


def test_stages_know_their_ranks() -> None:
    assert stage_ranks(from_csv("0F0,3F0\n1F0,2F0\n")) == {0: 0, 1: 1, 2: 1, 3: 0}
