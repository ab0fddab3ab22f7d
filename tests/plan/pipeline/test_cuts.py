"""Cuts: the balance is optimal, legal places are kept, and a bad split is told in full."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.cuts import atoms, balance, check_stages, split_at_borders, stages_by
from explorer.plan.pipeline.orders import gpipe, one_f_one_b
from explorer.record.graph import Block, CutPoint, ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit


def graph(parameters: list[int], saved: list[int] | None = None, *, refused: tuple[int, ...] = ()) -> ModelGraph:
    chain = tuple(f"b{k}" for k in range(len(parameters)))
    blocks = tuple(
        Block(
            fqn=fqn,
            kind="B",
            n_calls=1,
            parameter_bytes=p,
            buffer_bytes=0,
            output_bytes=1,
            saved_bytes=s,
            forward_flops=p,
            rerun_flops=p,
        )
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
    for words in (
        "stage 1 is empty",
        "'b22' is not on the model's chain",
        "'b1' is in no stage",
        "'b0' is in two stages",
    ):
        assert words in str(caught.value)


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
