"""Every record goes through pipe, disk and JSON unharmed; what is no record's is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from explorer.errors import UnreadableFile
from explorer.record import Allocations, Measurement
from explorer.record.base import column, from_json, from_msgpack, from_plain, to_json, to_msgpack, to_plain
from tests.view.builders import logs, measured


@settings(max_examples=30, deadline=None)
@given(logs())
def test_a_record_with_columns_comes_back_as_it_was(log: Allocations) -> None:
    assert from_msgpack(to_msgpack(log), Allocations) == log
    assert from_json(to_json(log), Allocations) == log
    assert from_plain(to_plain(log), Allocations) == log


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b'{"n_ticks": 1}', "missing required field"),
        (b'{"n_ticks": "one"}', "n_ticks"),
        (b'{"surprise": 1}', "surprise"),
        (b"{", "Allocations"),
        (b"\xff", "Allocations"),
    ],
)
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
