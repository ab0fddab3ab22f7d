"""Candidates of a planner: modules that save something and are safe, stretches of chains, kept operators, prices."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from explorer.plan.names import above, is_within
from explorer.plan.planners import candidates
from explorer.plan.planners.candidates import (
    MOST_CANDIDATES,
    MOST_SEGMENTS,
    MOST_STRETCHES,
    _in_error,
    candidates_of,
    offered_units,
    preset_units,
    units_near,
    units_that_keep_results,
)
from explorer.plan.predict.calls import SavedByCall
from explorer.plan.predict.replay import Replay
from explorer.record import Measurement
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from tests.graphs import block, changed, graph_of, with_costs
from tests.plan.planners.samples import graph_and_run, planner
from tests.plan.predict import test_offloaded as offloaded


def _chain(n: int, *, inner: int = 0) -> ModelGraph:
    """n equal blocks in a list, each of `inner` operations, the next given what the one before returned."""
    blocks = [block("", "Net", 10.0), block("h", "ModuleList", 10.0, n_calls=0)]
    for i in range(n):
        blocks.append(block(f"h.{i}", "B", follows=f"h.{i - 1}" if i else "", repeat_of="h.0" if i else None))
        blocks += [block(f"h.{i}.{j}", "Op") for j in range(inner)]
    return graph_of(*blocks, chain=tuple(f"h.{i}" for i in range(n)))


@pytest.mark.parametrize("fields", [{"saved_bytes": 0}, {"n_calls": 0}], ids=["saves nothing", "never called"])
def test_a_module_that_could_free_nothing_is_not_offered(fields: dict[str, object]) -> None:
    whole = _chain(2, inner=1)
    assert ("h.1.0",) in offered_units(whole)
    assert ("h.1.0",) not in offered_units(changed(whole, h__1__0=fields))


def test_no_stretch_reaches_over_a_place_where_more_happens_than_handing_on() -> None:
    units = offered_units(changed(_chain(4), h__2={"follows": ""}))
    assert [unit for unit in units if len(unit) > 1] == [("h.0", "h.1"), ("h.2", "h.3")]


@pytest.mark.parametrize("n", [2, 7, MOST_SEGMENTS + 2])
def test_a_length_is_offered_as_a_whole_or_not_at_all(n: int) -> None:
    lengths = Counter(len(unit) for unit in offered_units(_chain(n)) if len(unit) > 1)
    assert lengths.total() <= MOST_SEGMENTS
    assert lengths == {length: n - length + 1 for length in range(2, max(lengths, default=1) + 1)}
    following = max(lengths, default=1) + 1
    assert following > n or lengths.total() + n - following + 1 > MOST_SEGMENTS, "one length more would have fitted"


@pytest.mark.parametrize("n", [3, 32, 60])
def test_a_chain_of_few_choices_is_offered_stretches_up_to_all_of_it_from_every_block(n: int) -> None:
    stretches = [unit for unit in offered_units(_chain(n), every_stretch=True) if len(unit) > 1]
    lengths = Counter(map(len, stretches))
    assert len(stretches) <= MOST_STRETCHES and {2, n} <= set(lengths)
    assert lengths == {length: n - length + 1 for length in lengths}
    assert len(lengths) == n - 1 or n * (n - 1) // 2 > MOST_STRETCHES, "all lengths where they are few enough"


def test_of_a_large_model_nothing_inside_repeated_blocks_is_offered() -> None:
    small, large = _chain(40, inner=4), _chain(MOST_CANDIDATES // 4, inner=4)
    assert ("h.0.1",) in offered_units(small)
    assert offered_units(large) == [(f"h.{i}",) for i in range(MOST_CANDIDATES // 4)]


def test_presets_are_preset_units() -> None:
    wholes = preset_units(_chain(16))
    assert tuple(Unit(blocks=(f"h.{i}",)) for i in range(0, 16, 3)) in wholes, "every third"
    assert any(len(unit.blocks) > 1 for whole in wholes for unit in whole), "segments of sqrt"
    assert len(set(wholes)) == len(wholes) and all(wholes)
    alone = _chain(1)
    assert preset_units(msgspec.structs.replace(alone, blocks=alone.blocks[:1], chain=())) == [], "nothing to count"


def test_each_knows_those_around_it_innermost_first() -> None:
    candidates = planner("gpt").candidates
    names = [one.unit.blocks for one in candidates.units]
    for one, around in zip(candidates.units, candidates.around, strict=True):
        outer = [names[i][0] for i in around if len(names[i]) == 1]
        assert outer == [fqn for fqn in above(one.unit.blocks[0]) if fqn in outer]
        assert all(is_within(one.unit.blocks[0], fqn) for fqn in outer)


@pytest.mark.parametrize("sample", ["gpt", "unet"])
def test_a_call_lies_in_the_calls_around_it_even_where_it_fills_them(sample: str) -> None:
    """Every block is called once, so each candidate around one has the call around its call; and the other way."""
    candidates = planner(sample).candidates
    (calls,) = zip(*(one.calls for one in candidates.units))
    inside: list[list[tuple[int, SavedByCall]]] = [[] for _ in calls]
    for i, around in enumerate(candidates.around):
        assert candidates.calls_around(i, calls[i]) == [(outer, calls[outer]) for outer in around]
        for outer in around:
            inside[outer].append((i, calls[i]))
    assert [candidates.calls_inside(i, call) for i, call in enumerate(calls)] == inside
    nested = [(calls[i], calls[outer]) for i, around in enumerate(candidates.around) for outer in around]
    edge = "first" if sample == "gpt" else "end"
    assert any(getattr(one, edge) == getattr(outer, edge) for one, outer in nested), "it shows it"


def test_a_block_that_writes_into_its_input_forbids_the_segments_that_begin_with_it_alone() -> None:
    graph = changed(_chain(5), h__2={"traits": ("changes_inputs",)})
    units = offered_units(graph, every_stretch=True)
    assert _in_error(graph, units) == {unit for unit in units if unit[0] == "h.2"}


def test_an_offloaded_unit_costs_the_time_of_its_copies_both_ways() -> None:
    """Block a moves 90 bytes, b 50, at a byte a millisecond."""
    run = offloaded.step(offloaded.ROWS)
    replay = Replay.of(run, offloaded.GRAPH)
    assert replay is not None
    chosen = candidates_of(run, offloaded.GRAPH, replay, [offloaded.A, offloaded.B], 1e3)
    assert (chosen.cost_unit, [one.cost for one in chosen.units]) == ("ms", [2 * 90, 2 * 50])


def test_segments_near_a_plan_have_ends_up_to_three_blocks_away() -> None:
    """Of three segments, of their neighbours as one, and of two equal ones in their place: some 400."""
    blocks = [f"h.{i}" for i in range(32)]
    units = tuple(Unit(blocks=tuple(blocks[first:end])) for first, end in ((0, 4), (4, 12), (12, 16)))
    borders = [(0, 4), (4, 12), (12, 16), (0, 12), (4, 16), (0, 16), (0, 8), (8, 16)]
    near = range(-3, 4)
    expected = {tuple(blocks[max(first + i, 0) : end + j]) for first, end in borders for i in near for j in near}
    found = {unit.blocks for unit in units_near(_chain(32), Policy(units=units))}
    assert found == {blocks for blocks in expected if len(blocks) > 1}


PRODUCTS = ("aten.addmm.default", "aten.bmm.default")


def units(run: Measurement) -> list[Unit]:
    graph, _ = graph_and_run("gpt")
    replay = Replay.of(run, graph)
    assert replay is not None
    return list(units_that_keep_results(run, graph, replay))


def test_each_block_may_keep_all_of_its_products_or_one_kind() -> None:
    _, run = graph_and_run("gpt")
    assert units(run) == [
        Unit(blocks=(f"blocks.{i}",), action="save_ops", save_ops=ops)
        for i in range(3) for ops in (PRODUCTS, PRODUCTS[:1], PRODUCTS[1:])
    ]  # fmt: skip


def test_none_is_offered_where_operators_or_looks_at_them_were_not_timed() -> None:
    _, run = graph_and_run("gpt")
    assert units(with_costs(run, operator_ms={})) == []
    unlooked = msgspec.structs.replace(run.times, kept_operator_ms=None)
    assert units(msgspec.structs.replace(run, times=unlooked)) == []


def test_of_a_model_with_many_blocks_none_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = graph_and_run("gpt")
    monkeypatch.setattr(candidates, "MOST_BLOCKS", 2)
    assert units(run) == []
