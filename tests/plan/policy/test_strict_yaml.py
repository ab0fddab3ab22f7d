"""Strangers' YAML: every trick is refused with its line, and every value knows its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.plan.policy.strict_yaml import LARGEST_BYTES, Document


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: &x 2\n", "line 2: anchors and aliases"),
        ("a: 1\nb: *x\n", "line 2: anchors and aliases"),
        ("a: !!python/object:os.system 1\n", "line 1: the tag"),
        ("a: 1\n\na: 2\n", "line 3: the field a is there twice"),
        ("a: 1\n2: 3\n", "line 2: a field name must be text"),
        ("[" * 17 + "]" * 17, "line 1: more than 16 levels deep"),
        ("a: [1\n", "This is not YAML: line"),
        ("a: \x07\n", "This is not YAML: "),
        ("a" * (LARGEST_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_what_does_not_belong_there(text: str, words: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        Document(text)
    assert words in caught.value.sentence


def test_sixteen_levels_are_not_too_many() -> None:
    assert Document("[" * 16 + "1" + "]" * 16).plain


def test_every_value_knows_its_line() -> None:
    document = Document("a:\n  b: 1\n  c:\n  - x\n  - y\nd: 2024-01-01\n")
    assert document.plain == {"a": {"b": 1, "c": ["x", "y"]}, "d": "2024-01-01"}, "a date is its text"
    assert [document.line(path) for path in (("a",), ("a", "b"), ("a", "c", 1), ("d",))] == [1, 2, 5, 6]
    assert document.line(("a", "c", 7, "nothing")) == document.line(("a", "c")) == 3, "the nearest that is there"


@given(st.text(alphabet="ab:-[]{}&*!#'\" \n0~", max_size=40))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    try:
        Document(text)
    except UnreadableFile as error:
        assert "\n" not in error.sentence
