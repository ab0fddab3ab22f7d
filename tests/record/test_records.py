"""Records: their base, graphs, policies, failures, sounds; what they refuse and what they derive."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import (
    BadInput,
    Cancelled,
    Crashed,
    InvalidPolicy,
    ModelFailed,
    NotOnThisDevice,
    OutOfMemory,
    TimedOut,
    UnreadableFile,
)
from explorer.record import KEEP_ALL, Allocations, Measurement, ModelGraph, ModelRef, PhaseSpan, Policy, Unit
from explorer.record.base import column, from_json, from_msgpack, from_plain, to_json, to_msgpack, to_plain
from explorer.record.bounded_file import unpack
from explorer.record.card import Card
from explorer.record.failure import Failure, failure_of, is_out_of_memory
from explorer.record.measurement import RecordedRanks
from explorer.record.run import RunSpec
from explorer.record.sound import unsound
from tests.graphs import block, gpt
from tests.record.test_measurement import log_of
from tests.view.builders import compared, logs, measured, runs


@settings(max_examples=30, deadline=None)
@given(logs())
def test_a_record_with_columns_comes_back_as_it_was(log: Allocations) -> None:
    assert from_msgpack(to_msgpack(log), Allocations) == log
    assert from_json(to_json(log), Allocations) == log
    assert from_plain(to_plain(log), Allocations) == log


@pytest.mark.parametrize(("document", "words"), [
    (b'{"n_ticks": 1}', "missing required field"),
    (b'{"n_ticks": "one"}', "n_ticks"),
    (b'{"surprise": 1}', "surprise"),
    (b"{", "Allocations"),
    (b"\xff", "Allocations"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_field(document: bytes, words: str) -> None:
    with pytest.raises(UnreadableFile, match=words):
        from_json(document, Allocations)


def test_a_column_is_whole_numbers_of_eight_bytes() -> None:
    document = to_msgpack(measured())
    column_bytes = column([3, 4]).tobytes()
    assert from_msgpack(to_msgpack({"a": column([3, 4])}), dict) == {"a": column_bytes}
    with pytest.raises(UnreadableFile, match="7 bytes"):
        from_plain({**to_plain(measured().allocations), "born": b"1234567"}, Allocations)
    with pytest.raises(UnreadableFile):
        from_msgpack(document[:-1], Measurement)


def test_what_is_no_column_does_not_belong_in_a_record() -> None:
    for write in (to_msgpack, to_json, to_plain):
        with pytest.raises(NotImplementedError, match="object does not belong in a record"):
            write(object())


def test_children_of_a_called_sequential_follow_each_other() -> None:
    blocks = (block("", "M"), block("body", "Sequential"), block("body.0", "A"), block("body.1", "B"))
    chain = ModelGraph(model=ModelRef(target="made"), blocks=blocks, edges=())
    assert chain.next_in_turn == {"body.0": "body.1"}
    iterated = msgspec.structs.replace(
        chain,
        blocks=(
            *blocks[:1],
            block("body", "Sequential", n_calls=0),
            *blocks[2:3],
            block("body.1", "B", follows="body.0"),
        ),
    )
    assert iterated.next_in_turn == {}


def test_elsewhere_blocks_follow_what_hands_on_to_them() -> None:
    graph = gpt(4)
    assert graph.next_in_turn == {}, "an older record does not know"
    follows = {"blocks.1": "blocks.0", "blocks.3": "blocks.2", "head": "norm"}
    blocks = tuple(msgspec.structs.replace(one, follows=follows.get(one.fqn, "")) for one in graph.blocks)
    graph = msgspec.structs.replace(graph, blocks=blocks)
    assert graph.next_in_turn == {"blocks.0": "blocks.1", "blocks.2": "blocks.3", "norm": "head"}


def test_a_name_is_a_unit_and_a_tuple_is_a_segment() -> None:
    policy = Policy.recompute(["a", ("b", "c")], early_stop=False)
    assert policy.units == (Unit(blocks=("a",)), Unit(blocks=("b", "c")))
    assert policy.blocks == ("a", "b", "c") and not policy.early_stop
    assert Policy.recompute([]) == KEEP_ALL


@pytest.mark.parametrize("make", [
    lambda: Policy.recompute("blocks.0"),
    lambda: Policy.recompute(["blocks.0"], restore_rng="python"),
    lambda: Policy(restore_rng="blocks.0"),
    lambda: Unit(blocks="blocks.0"),
    lambda: Unit(blocks=("blocks.0",), action="save_ops", save_ops="aten.mm.default"),
])  # fmt: skip
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


CPU = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
)


def test_words_alone_are_not_enough_and_a_circle_ends() -> None:
    assert not is_out_of_memory(ValueError("std::bad_alloc")) and not is_out_of_memory(RuntimeError("memory"))
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


def test_bytes_asked_are_read_from_torchs_words() -> None:
    failure = failure_of(RuntimeError(CPU), in_step=True)
    assert (failure.asked_bytes, failure.sentence) == (4096, "The run asked for 4,096 bytes and was refused.")
    own = failure_of(OutOfMemory("full", asked_bytes=7, free_bytes=3, hint="less"), in_step=False)
    assert (own.asked_bytes, own.free_bytes, own.hint) == (7, 3, "less")


def test_what_the_models_own_code_raises_is_told_by_its_place() -> None:
    """This file stands for the model's."""
    kinds = []
    for call in (lambda: {}["x"], lambda: json.loads("{"), lambda: column("x"), lambda: np.empty(-1)):
        try:
            call()
        except Exception as error:
            kinds.append(failure_of(error, in_step=False).kind)
    assert kinds == ["model raised", "model raised", "internal", "model raised"]


@settings(max_examples=25)
@given(st.text(), st.text(alphabet="\x1b\udcffab é\n", max_size=30), st.integers(1, 3000))
def test_any_failure_can_be_written_and_shown(text: str, part: str, times: int) -> None:
    failure = Failure(kind="crash", sentence=text + part * times, hint=part * times, traceback=part * times)
    assert from_msgpack(to_msgpack(failure), Failure) == failure
    assert failure.sentence.isprintable() and len(failure.sentence) < 20_000
    assert all(len(word) <= 240 for word in failure.hint.split())


@pytest.mark.parametrize(("error", "in_step", "elsewhere"), [
    (ModelFailed("x"), "model raised", "model raised"),
    (BadInput("x"), "bad input", "bad input"),
    (NotOnThisDevice("x"), "not on this device", "not on this device"),
    (Cancelled("x"), "cancelled", "cancelled"),
    (TimedOut("x"), "time-out", "time-out"),
    (Crashed("x"), "crash", "crash"),
    (KeyboardInterrupt(), "cancelled", "cancelled"),
    (SystemExit(3), "model raised", "model raised"),
    (GeneratorExit(), "model raised", "model raised"),
    (KeyError("x"), "model raised", "internal"),
])  # fmt: skip
def test_the_table_of_kinds(error: BaseException, in_step: str, elsewhere: str) -> None:
    assert failure_of(error, in_step=True).kind == in_step
    assert failure_of(error, in_step=False).kind == elsewhere


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


@pytest.mark.parametrize(("run", "fault"), [
    (changed(n_ticks=10**9), "1000000000 ticks for"),
    (changed(role=column()), "role has 0 entries instead of"),
    (broken("role", 0, 99), "role goes from 0 to 99"),
    (broken("block", 1, -1), "block goes from -1"),
    (broken("n_bytes", 0, -5), "n_bytes goes from -5"),
    (broken("died", -1, 0), "an allocation dies before it is born"),
    (changed(time_ns=column([1])), "time_ns has 1 entries for"),
    (changed(weight_casts=column([10**6])), "weight_casts goes from 1000000"),
    (changed(released=column([1])), "released has 1 entries instead of"),
    (
        msgspec.structs.replace(RUN, phases=(PhaseSpan(phase="forward", block="", first_tick=5, end_tick=4),)),
        "a phase from tick 5 to 4",
    ),
])  # fmt: skip
def test_a_fault_is_told_by_name(run: Measurement, fault: str) -> None:
    assert unsound(run).startswith(fault)


@pytest.mark.parametrize(("n_ticks", "fault"), [(6, ""), (7, "7 ticks for 3 allocations")])
def test_each_allocation_has_two_ticks_at_most(n_ticks: int, fault: str) -> None:
    assert unsound(replace(RUN, allocations=log_of([(5, 1, 2)] * 3, n_ticks), phases=())) == fault


@pytest.mark.parametrize(("lived", "fault"), [(0, ""), (-1, "an allocation dies before it is born")])
def test_an_allocation_may_die_when_it_is_born_and_not_before(lived: int, fault: str) -> None:
    assert unsound(replace(RUN, allocations=log_of([(5, 2, lived), (5, 1, 2)], 4), phases=())) == fault


@pytest.mark.parametrize(("ratio", "is_read"), [(190, True), (210, False)])
def test_two_hundred_times_the_packed_bytes_are_unpacked(ratio: int, *, is_read: bool) -> None:
    noise = random.Random(0).randbytes(1000)
    n_zeros = next(n for n in itertools.count(0, 1000) if n >= ratio * len(zlib.compress(noise + bytes(n))))
    content = noise + bytes(n_zeros)
    with nullcontext() if is_read else pytest.raises(UnreadableFile, match="the most that are read"):
        assert unpack(zlib.compress(content), 2**30, "a file") == content


def test_where_there_are_several_runs_the_one_at_fault_is_named() -> None:
    wrong = broken("role", 0, 99)
    pair = compared()
    assert unsound(pair) == "" and unsound(msgspec.structs.replace(pair, candidate=wrong)).startswith("candidate: role")
    ranks = RecordedRanks(ranks=(msgspec.structs.replace(wrong, rank=3),), n_ranks=4, recorded_in="train.py:1")
    assert unsound(ranks).startswith("rank 3: role")
    assert unsound(msgspec.structs.replace(ranks, ranks=())) == "no rank"


def test_a_gpu_holds_the_output_whether_it_is_measured_or_predicted() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/gpt.py"))
    card = Card(name="any", total_bytes=2**30)
    on_gpu = replace(spec, device="cuda"), replace(spec, card=card)
    assert [case.output_is_held for case in (spec, *on_gpu)] == [False, True, True]
    for default in (spec, *on_gpu):
        assert [replace(default, holds_output=chosen).output_is_held for chosen in (True, False)] == [True, False]
