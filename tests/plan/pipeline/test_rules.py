"""A broken schedule is refused by the name of the action that breaks it."""

from __future__ import annotations

import pytest

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import parse_rows
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.plan.pipeline.rules import check_rows, play

TWO_STAGES = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["0F0", "0F0", "0F1", "0B0", "0B1"], TWO_STAGES[1]], "0F0 appears 2 times"),
        ([["0F0", "0F1", "0B0"], TWO_STAGES[1]], "0B1 is missing"),
        ([["0F1", "0B0", "0B1"], TWO_STAGES[1]], "0F0 is missing"),
        ([["0F0", "0F1", "0B0", "0I1"], TWO_STAGES[1]], "0W1 is missing"),
        ([["0F0", "0F1", "0B0", "0B1", "0I1", "0W1"], TWO_STAGES[1]], "0B1 is there beside"),
        ([["0F0", "0B0", "0B1", "0F1"], TWO_STAGES[1]], "0B1 comes before 0F1 on rank 0"),
        ([["0F0", "0F1", "0B0", "0W1", "0I1"], TWO_STAGES[1]], "0W1 comes before 0I1 on rank 0"),
        ([["0F0", "0F1", "0B0", "0B1", "1B1"], ["1F0", "1B0", "1F1"]], "stage 1 is on ranks 0 and 1"),
        ([TWO_STAGES[0], [*TWO_STAGES[1], "2F0"]], "2F0 names stage 2 of 2"),
        ([[*TWO_STAGES[0], "0F2"], TWO_STAGES[1]], "0F2 names microbatch 2 of 2"),
    ],
)
def test_each_rule_names_the_action(rows: list[list[str]], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        check_rows(parse_rows(rows), n_stages=2, n_microbatches=2)
    assert words in str(caught.value)


def test_a_deadlock_says_who_waits_for_what() -> None:
    rows = parse_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    with pytest.raises(InvalidPlan) as caught:
        check_rows(rows, n_stages=2, n_microbatches=2)
    assert "rank 0 waits at 0B0 for 1B0" in str(caught.value)
    assert "rank 1 waits at 1F1 for 0F1" in str(caught.value)


def test_play_respects_every_row_and_every_need() -> None:
    rows = one_f_one_b(3, 4)
    order = play(rows)
    for row in rows:
        assert [action for action in order if action in row] == list(row)
    place = {action: index for index, action in enumerate(order)}
    for action in order:
        if action.kind == "F" and action.stage:
            assert place[action._replace(stage=action.stage - 1)] < place[action]
        if action.kind == "B" and action.stage < 2:
            assert place[action._replace(stage=action.stage + 1)] < place[action]
