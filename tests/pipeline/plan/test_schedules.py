"""Schedules as text and the laws that each keeps; cuts are balanced and legal, and a bad split is told in full."""

from __future__ import annotations

import csv
from collections import Counter
from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis.strategies import builds, integers, lists, sampled_from
from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.actions import Action, check_rows, execution_order, format_rows, parse_rows, to_csv
from explorer.pipeline.plan.cuts import (
    atoms,
    balance,
    check_stages,
    n_in_flight,
    special_units,
    split_at_borders,
    stages_by,
)
from explorer.pipeline.plan.schedules import SCHEDULES, default_ranks, gpipe, one_f_one_b, rows_of
from explorer.pipeline.record.step import ActionCost, BlockCost, PipelineProfile
from explorer.record.graph import CutPoint, ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.policy import Action as UnitAction
from explorer.record.run import PipelinePlan, RunSpec
from tests.graphs import block
from tests.pipeline.pipelines import HOST

ACTIONS = builds(Action, integers(0, 40), sampled_from("FBIW"), integers(0, 40))
ROWS = lists(lists(ACTIONS, min_size=1, max_size=9).map(tuple), min_size=1, max_size=5).map(tuple)


@given(rows=ROWS)
def test_rows_survive_csv_and_text(rows: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_rows(csv.reader(to_csv(rows).splitlines())) == rows
    assert parse_rows(format_rows(rows)) == rows


def test_every_bad_cell_is_named_at_once() -> None:
    with pytest.raises(InvalidPlan) as caught:
        parse_rows([["0F0", "0X1"], ["F1"]])
    assert "'0X1' (rank 0, cell 1)" in str(caught.value)
    assert "'F1' (rank 1, cell 0)" in str(caught.value)


@given(n_ranks=integers(1, 6), n_microbatches=integers(1, 9))
def test_one_f_one_b_keeps_few_in_flight(n_ranks: int, n_microbatches: int) -> None:
    expected = [min(n_microbatches, n_ranks - rank) for rank in range(n_ranks)]
    assert list(n_in_flight(one_f_one_b(n_ranks, n_microbatches))) == expected


def test_a_split_backward_is_in_flight_until_its_weight_gradients() -> None:
    rows = parse_rows([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert n_in_flight(rows) == (2, 1)


def test_single_blocks_that_keep_results_or_offload_are_measured() -> None:
    units = tuple(
        Unit(blocks=blocks, action=action)
        for action in get_args(UnitAction) for blocks in (("b0",), ("b0", "b1"), ("elsewhere",))
    )  # fmt: skip
    policy = Policy(
        units=tuple(replace(unit, save_ops=("aten.mm.default",) * (unit.action == "save_ops")) for unit in units)
    )
    special = special_units(policy, PipelinePlan(stages=(("b0",), ("b1",)), n_microbatches=1))
    assert [(unit.action, unit.blocks) for unit in special] == [
        (action, ("b0",)) for action in get_args(UnitAction) if action != "recompute"
    ]  # fmt: skip


def test_one_f_one_b_reads_as_in_the_paper() -> None:
    """test_in_process.py holds all other lists against torch's."""
    assert format_rows(one_f_one_b(2, 3)) == (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"),
        ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"),
    )


TWO_STAGES = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.mark.parametrize(("rows", "words"), [
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
])  # fmt: skip
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


def test_the_order_respects_every_row_and_every_need() -> None:
    rows = one_f_one_b(3, 4)
    order = execution_order(rows)
    for row in rows:
        assert [action for action in order if action in row] == list(row)
    place = {action: index for index, action in enumerate(order)}
    for action in order:
        if action.kind == "F" and action.stage:
            assert place[action._replace(stage=action.stage - 1)] < place[action]
        if action.kind == "B" and action.stage < 2:
            assert place[action._replace(stage=action.stage + 1)] < place[action]


def plan(schedule: str, n_stages: int, n_microbatches: int, **fields: object) -> PipelinePlan:
    stages = tuple((f"blocks.{j}",) for j in range(n_stages))
    return PipelinePlan(stages=stages, n_microbatches=n_microbatches, schedule=schedule, **fields)  # type: ignore[arg-type]


@given(schedule=sampled_from(tuple(SCHEDULES)), n_ranks=integers(1, 5), n_rounds=integers(1, 3))
def test_each_stage_does_each_microbatch_once_each_way(schedule: str, n_ranks: int, n_rounds: int) -> None:
    n_stages = n_ranks * (1 if schedule in ("GPipe", "1F1B") else 2)
    n_microbatches = 2 * n_ranks * n_rounds
    rows = rows_of(plan(schedule, n_stages, n_microbatches))
    assert len(rows) == n_ranks
    done = Counter(action for row in rows for action in row)
    assert set(done.values()) == {1}
    for stage in range(n_stages):
        for i in range(n_microbatches):
            kinds = sorted(action.kind for action in done if action.stage == stage and action.microbatch == i)
            assert kinds in (["B", "F"], ["F", "I", "W"])


def test_only_zero_bubble_schedules_split_the_backward() -> None:
    for name, schedule in SCHEDULES.items():
        kinds = {action.kind for row in rows_of(plan(name, 4, 8)) for action in row}
        assert ("W" in kinds) == schedule.splits_backward


def test_default_ranks_hold_two_stages_where_a_schedule_needs_them() -> None:
    assert {name: default_ranks(name, 4) for name in SCHEDULES} == {
        name: 4 if schedule.shape == "single" else 2 for name, schedule in SCHEDULES.items()
    }


@pytest.mark.parametrize(("wrong", "words"), [
    (plan("1F1B", 4, 2), "at least as many microbatches as stages: 2 for 4 stages"),
    (plan("DualPipeV", 4, 3), "at least as many microbatches"),
    (plan("GPipe", 4, 4, n_ranks=2), "one stage a rank; 4 stages are asked on 2 ranks"),
    (plan("Interleaved1F1B", 3, 4, n_ranks=3), "two or more stages on every rank"),
    (plan("ZBVZeroBubble", 6, 6, n_ranks=2), "exactly two stages a rank"),
    (plan("Interleaved1F1B", 8, 9), "do not divide"),
    (plan("1F1b", 2, 2), "Did you mean 1F1B"),
    (plan("GPipe", 0, 2), "needs stages"),
])  # fmt: skip
def test_impossible_plans_are_refused_with_their_numbers(wrong: PipelinePlan, words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        rows_of(wrong)
    assert words in str(caught.value)


def test_own_actions_are_taken_as_they_are() -> None:
    own = (("0F0", "0F1", "0B1", "0B0"),)
    assert format_rows(rows_of(plan("GPipe", 1, 2, actions=own))) == own


def graph(parameters: list[int], saved: list[int] | None = None, *, refused: tuple[int, ...] = ()) -> ModelGraph:
    chain = tuple(f"b{k}" for k in range(len(parameters)))
    blocks = tuple(
        block(fqn, "B", parameter_bytes=p, saved_bytes=s, forward_flops=p, output_bytes=1)
        for fqn, p, s in zip(chain, parameters, saved or parameters)
    )
    cuts = tuple(
        CutPoint(after=a, before=b, n_bytes=1, n_tensors=1, refusal="shared" if k in refused else None)
        for k, (a, b) in enumerate(zip(chain, chain[1:]))
    )
    return ModelGraph(model=ModelRef(target="m.py"), blocks=blocks, edges=(), cuts=cuts, chain=chain)


@given(weights=lists(integers(1, 50), min_size=1, max_size=8), n_stages=integers(1, 8))
def test_no_other_split_has_a_lighter_heaviest_stage(weights: list[int], n_stages: int) -> None:
    n_stages = min(n_stages, len(weights))
    starts = balance(len(weights), n_stages, lambda stage, first, end: sum(weights[first:end]))

    def heaviest(cuts: tuple[int, ...]) -> int:
        ends = (*cuts[1:], len(weights))
        return max(sum(weights[a:b]) for a, b in zip(cuts, ends))

    best = min(heaviest((0, *cuts)) for cuts in combinations(range(1, len(weights)), n_stages - 1))
    assert heaviest(starts) == best
    assert len(starts) == n_stages
    assert sorted(set(starts)) == list(starts)


@pytest.mark.parametrize(("weights", "starts"), [([1, 1, 1], (0, 1)), ([2, 0, 0, 2], (0, 1)), ([1, 2, 1], (0, 1))])
def test_equal_splits_go_to_the_earliest_cut(weights: list[int], starts: tuple[int, ...]) -> None:
    assert balance(len(weights), 2, lambda stage, first, end: sum(weights[first:end])) == starts


def test_time_without_a_profile_is_flops() -> None:
    assert stages_by("by-time", graph([5, 5, 5, 5]), 2) == (("b0", "b1"), ("b2", "b3"))


def test_refused_cuts_hold_blocks_together() -> None:
    fenced = graph([1, 1, 9, 9], refused=(2,))
    assert atoms(fenced) == (("b0",), ("b1",), ("b2", "b3"))
    assert stages_by("by-parameters", fenced, 2) == (("b0", "b1"), ("b2", "b3"))


def test_memory_counts_what_the_schedule_keeps_in_flight() -> None:
    even = graph([0] * 8, [100] * 8)
    equal = stages_by("by-memory", even, 2, pressure=(KEEP_ALL, gpipe(2, 4)))
    skewed = stages_by("by-memory", even, 2, pressure=(KEEP_ALL, one_f_one_b(2, 4)))
    assert [len(blocks) for blocks in equal] == [4, 4]
    assert len(skewed[0]) < len(skewed[1])  # the first rank holds two microbatches, the last one


@pytest.mark.parametrize(("parameters", "saved", "n_microbatches", "first"), [
    ([20, 0, 0, 0], [0, 20, 20, 20], 1, 1),  # parameters count twice, for their gradients: 60 in any case
    ([19, 0, 0, 0], [0, 20, 20, 20], 1, 2),
    ([20, 0, 0, 0], [0, 20, 20, 20], 2, 1),  # all of GPipe's microbatches wait: as one batch
])  # fmt: skip
def test_memory_counts_parameters_twice_and_a_batch_once(
    parameters: list[int], saved: list[int], n_microbatches: int, first: int
) -> None:
    stages = stages_by("by-memory", graph(parameters, saved), 2, pressure=(KEEP_ALL, gpipe(2, n_microbatches)))
    assert len(stages[0]) == first


@pytest.mark.parametrize(("gradient_bytes", "batch_rows", "recomputed", "first"), [
    (30, 2, (), 1), (0, 2, (), 2), (30, 4, (), 2), (30, 4, ("b2", "b3"), 1),
])  # fmt: skip
def test_memory_of_a_profile_is_its_bytes_for_the_whole_batch(
    gradient_bytes: int, batch_rows: int, recomputed: tuple[str, ...], first: int
) -> None:
    """b0 holds 30 of parameters and their gradients; each other block saves 20 of two rows, recomputed 1."""
    costs = [
        BlockCost(
            blocks=(f"b{k}",), output_bytes=1,
            parameter_bytes=0 if k else 30, gradient_bytes=0 if k else gradient_bytes,
            kept=ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=20 if k else 0),
            recomputed=ActionCost(forward_ms=1.0, backward_ms=3.0, saved_bytes=1 if k else 0),
        )
        for k in range(4)
    ]  # fmt: skip
    profile = PipelineProfile(
        spec=RunSpec(model=ModelRef(target="m.py")), environment=HOST, n_rows=2, batch_rows=batch_rows,
        blocks=tuple(costs),
    )  # fmt: skip
    pressure = (Policy.recompute(recomputed), gpipe(2, 1))
    stages = stages_by("by-memory", graph([1] * 4, [1] * 4), 2, profile=profile, pressure=pressure)
    assert len(stages[0]) == first
    slow = replace(costs[0], kept=replace(costs[0].kept, backward_ms=5.0))
    for blocks, n_first in ((costs, 2), ([slow, *costs[1:]], 1)):  # 3 ms each; 6, 3, 3, 3
        timed = replace(profile, blocks=tuple(blocks))
        assert len(stages_by("by-time", graph([1] * 4), 2, profile=timed)[0]) == n_first


def test_memory_knows_the_policy() -> None:
    even = graph([0] * 4, [100] * 4)
    lightened = Policy.recompute(["b0", "b1"])
    assert stages_by("by-memory", even, 2, pressure=(lightened, gpipe(2, 4))) == (("b0", "b1", "b2"), ("b3",))


def test_too_many_stages_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(InvalidPlan, match="5 stages are asked, and m.py can be cut into 3 at most"):
        stages_by("by-parameters", graph([1, 1, 1]), 5)


def test_all_faults_of_a_split_are_told_at_once() -> None:
    with pytest.raises(InvalidPlan) as caught:
        check_stages(graph([1, 1, 1]), (("b0", "b0"), (), ("b22",)))
    faults = ("stage 1 is empty", "'b22' is not on the model's chain", "'b1' is in no stage", "'b0' is in two stages")
    assert all(words in str(caught.value) for words in faults)


def test_order_and_refusals_are_checked() -> None:
    with pytest.raises(InvalidPlan, match="stages run in the order"):
        check_stages(graph([1, 1]), (("b1",), ("b0",)))
    with pytest.raises(InvalidPlan, match="no cut after 'b0': shared"):
        check_stages(graph([1, 1], refused=(0,)), (("b0",), ("b1",)))
    check_stages(graph([1, 1]), (("b0",), ("b1",)))


def test_a_segment_ends_where_its_stage_does() -> None:
    units = (("b0", "b1", "b2"), ("b3", "b4.inner"), ("b4.one", "b4.two"), ("b5",))
    policy = Policy(units=tuple(Unit(blocks=blocks) for blocks in units), preserve_rng_state=False)
    split = split_at_borders(policy, (("b0", "b1"), ("b2", "b3", "b4", "b5")))
    assert [unit.blocks for unit in split.units] == [("b0", "b1"), ("b2",), ("b3",), ("b4.inner",), *units[2:]]
    assert not split.preserve_rng_state
    whole = Policy(units=(Unit(blocks=("layers",)), Unit(blocks=("head",))))
    assert split_at_borders(whole, (("layers.0",), ("layers.1", "head"))) == Policy(units=(Unit(blocks=("head",)),))
