"""Messages arrive whole, in any pieces; a torn one is refused. What a request is about is read from its fields."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.jobs.protocol import (
    DESCRIBE_LIMIT_S,
    CancelJob,
    Command,
    Compare,
    Describe,
    EndJob,
    Frames,
    Measure,
    RunLab,
    Submit,
    description_of,
    models_of,
    read_frame,
    time_limit_s,
    write_frame,
)
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

SPEC = RunSpec(model=ModelRef(target="a.py"), time_limit_s=30.0)
MESSAGES: list[Command] = [
    Submit(job="1", request=Measure(spec=SPEC)),
    CancelJob(job="1"),
    EndJob(job="2"),
    Submit(job="3", request=RunLab(name="dropout", switches={"a": "b"}), keep=False),
]


def stream_of(messages: list[Command]) -> bytes:
    stream = io.BytesIO()
    for message in messages:
        write_frame(stream, message)
    return stream.getvalue()


def test_what_is_written_is_read_and_then_nothing() -> None:
    stream = io.BytesIO(stream_of(MESSAGES))
    assert [read_frame(stream, Command) for _ in range(5)] == [*MESSAGES, None]


@given(st.integers(1, len(stream_of(MESSAGES[:1])) - 1))
def test_a_torn_message_is_refused(n_bytes: int) -> None:
    with pytest.raises(UnreadableFile, match="in the middle of a message"):
        read_frame(io.BytesIO(stream_of(MESSAGES[:1])[:n_bytes]), Command)


@given(st.lists(st.integers(1, 400), max_size=5))
def test_pieces_of_any_size_make_the_same_messages(cuts: list[int]) -> None:
    data, frames = stream_of(MESSAGES), Frames[Command](Command)
    read: list[Command] = []
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for first, last in zip(borders, borders[1:]):
        frames.add(data[first:last])
        while (message := frames.next()) is not None:
            read.append(message)
    assert read == MESSAGES


def test_a_length_that_nobody_means_is_refused_before_it_is_waited_for() -> None:
    frames = Frames[Command](Command)
    frames.add(b"\xff" * 8)
    with pytest.raises(UnreadableFile, match="was announced"):
        frames.next()


def test_the_longest_limit_of_its_runs_counts() -> None:
    longer = RunSpec(model=ModelRef(target="b.py"), time_limit_s=90.0)
    assert time_limit_s(Measure(spec=SPEC)) == 30.0
    assert time_limit_s(Compare(baseline=SPEC, candidate=longer)) == 90.0
    assert time_limit_s(Describe(model=SPEC.model)) == DESCRIBE_LIMIT_S


def test_the_model_of_a_request() -> None:
    assert models_of(Describe(model=SPEC.model)) == models_of(Measure(spec=SPEC)) == [SPEC.model]
    assert description_of(Measure(spec=SPEC)) == "measure a.py" and description_of(RunLab(name="x")) == "runlab"
