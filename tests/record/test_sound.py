"""Columns that do not fit together are told by name; those of a real run are never."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from explorer.record import Measurement, PhaseSpan
from explorer.record.base import column
from explorer.record.measurement import RecordedRanks
from explorer.record.sound import unsound
from tests.view.builders import compared, measured, runs

RUN = measured()


def changed(**columns: Any) -> Measurement:
    return msgspec.structs.replace(RUN, allocations=msgspec.structs.replace(RUN.allocations, **columns))


@settings(max_examples=20, deadline=None)
@given(runs())
def test_a_run_is_sound(run: Measurement) -> None:
    assert unsound(run) == ""


def broken(name: str, place: int, value: int) -> Measurement:
    assert RUN.allocations is not None
    values = list(getattr(RUN.allocations, name))
    values[place] = value
    return changed(**{name: column(values)})


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (changed(n_ticks=10**9), "1000000000 ticks for"),
        (changed(role=column()), "role has 0 entries instead of"),
        (broken("role", 0, 99), "role goes from 0 to 99"),
        (broken("block", 1, -1), "block goes from -1"),
        (broken("n_bytes", 0, -5), "n_bytes goes from -5"),
        (broken("died", -1, 0), "an allocation dies before it is born"),
        (changed(time_ns=column([1])), "time_ns has 1 entries for"),
        (changed(weight_casts=column([10**6])), "weight_casts goes from 1000000"),
        (
            msgspec.structs.replace(RUN, phases=(PhaseSpan(phase="forward", block="", first_tick=5, end_tick=4),)),
            "a phase from tick 5 to 4",
        ),
    ],
)
def test_a_fault_is_told_by_name(run: Measurement, fault: str) -> None:
    assert unsound(run).startswith(fault)


def test_where_there_are_several_runs_the_one_at_fault_is_named() -> None:
    wrong = broken("role", 0, 99)
    pair = compared()
    assert unsound(pair) == "" and unsound(msgspec.structs.replace(pair, candidate=wrong)).startswith("candidate: role")
    ranks = RecordedRanks(ranks=(msgspec.structs.replace(wrong, rank=3),), n_ranks=4, recorded_in="train.py:1")
    assert unsound(ranks).startswith("rank 3: role")
    assert unsound(msgspec.structs.replace(ranks, ranks=())) == "no rank"
