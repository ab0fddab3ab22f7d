"""Policies, the reading of a policy from outside, and the name of a schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from explorer.errors import InvalidPolicy
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.policy_file import PolicyFile, Reading
from explorer.record.run import OWN_SCHEDULE, PipelinePlan


def test_a_name_is_a_unit_and_a_tuple_is_a_segment() -> None:
    policy = Policy.recompute(["a", ("b", "c")], early_stop=False)
    assert policy.units == (Unit(blocks=("a",)), Unit(blocks=("b", "c")))
    assert policy.blocks == ("a", "b", "c") and not policy.early_stop
    assert Policy.recompute([]) == KEEP_ALL


@pytest.mark.parametrize(
    "make",
    [
        lambda: Policy.recompute("blocks.0"),
        lambda: Policy.recompute(["blocks.0"], restore_rng="python"),
        lambda: Policy(restore_rng="blocks.0"),
        lambda: Unit(blocks="blocks.0"),
        lambda: Unit(blocks=("blocks.0",), action="save_ops", save_ops="aten.mm.default"),
    ],
)
def test_one_name_where_names_belong_is_refused_and_not_spelled_out(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidPolicy, match="one name where a list of names belongs"):
        make()


def test_lists_are_as_good_as_tuples() -> None:
    listed = Policy(units=[Unit(blocks=["a"])], restore_rng=["python"])
    assert listed == Policy.recompute(["a"], restore_rng=("python",)) and hash(listed.units) and listed.restore_rng


def test_reentrant_checkpointing_never_stops_early() -> None:
    assert Policy().stops_early and not Policy(early_stop=False).stops_early
    assert not Policy(use_reentrant=True).stops_early


def test_what_it_was_made_for_is_remembered_and_neither_compared_nor_written() -> None:
    plain = Policy.recompute(["a"])
    made = Policy.recompute(["a"]).with_model_blocks({"a": 2})
    assert made.model_blocks == {"a": 2} and plain.model_blocks == {}
    assert made == plain and to_msgpack(made) == to_msgpack(plain)
    assert from_msgpack(to_msgpack(made), Policy).model_blocks == {}


def test_what_is_told() -> None:
    file = PolicyFile(policy=Policy.recompute(["a"]))
    assert Reading(source="a policy file", file=file).told == ()
    told = Reading(source="x", file=file, reasons=("r",), changed="c", notes=("n",))
    assert told.told == ("r", "c", "n") and told.policy is file.policy


def test_rows_of_ones_own_have_a_name_of_their_own() -> None:
    plan = PipelinePlan(stages=(("a",),), n_microbatches=1, schedule="1F1B")
    assert plan.schedule_name == "1F1B"
    assert PipelinePlan(stages=(("a",),), n_microbatches=1, actions=(("0F0",),)).schedule_name == OWN_SCHEDULE
