"""Blocks that keep results of operators: which are offered, and when none is."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.planners import candidates
from explorer.plan.planners.candidates import excludes_nesting, units_that_keep_results
from explorer.plan.predict.replay import Replay
from explorer.record import Measurement
from explorer.record.policy import Unit
from tests.plan.planners.test_budget import known

PRODUCTS = ("aten.addmm.default", "aten.bmm.default")


def units(run: Measurement) -> list[Unit]:
    graph, _ = known("gpt")
    replay = Replay.of(run, graph)
    assert replay is not None
    return list(units_that_keep_results(run, graph, replay))


def test_each_block_may_keep_all_of_its_products_or_one_kind() -> None:
    _, run = known("gpt")
    assert units(run) == [
        Unit(blocks=(f"blocks.{i}",), action="save_ops", save_ops=ops)
        for i in range(3) for ops in (PRODUCTS, PRODUCTS[:1], PRODUCTS[1:])
    ]  # fmt: skip


def test_none_is_offered_where_operators_or_looks_at_them_were_not_timed() -> None:
    _, run = known("gpt")
    untimed = tuple(msgspec.structs.replace(one, operator_ms={}) for one in run.blocks)
    assert units(msgspec.structs.replace(run, blocks=untimed)) == []
    unlooked = msgspec.structs.replace(run.times, kept_operator_ms=None)
    assert units(msgspec.structs.replace(run, times=unlooked)) == []


def test_of_a_model_with_many_blocks_none_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = known("gpt")
    monkeypatch.setattr(candidates, "MOST_BLOCKS", 2)
    assert units(run) == []


def test_what_does_more_than_recompute_stands_alone() -> None:
    assert excludes_nesting(Unit(blocks=("a",), action="save_ops", save_ops=PRODUCTS))
    assert excludes_nesting(Unit(blocks=("a",), action="offload"))
    assert not excludes_nesting(Unit(blocks=("a", "b")))
