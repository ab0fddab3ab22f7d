"""What lies in what, and how many are told."""

from __future__ import annotations

from explorer.plan.names import above, innermost, is_within, lineage, listed, operator_word, some


def test_a_block_lies_in_itself_in_its_holders_and_in_the_model() -> None:
    assert [is_within("a.b", block) for block in ("a.b", "a", "", "a.", "b", "a.b.c")] == [True] * 3 + [False] * 3
    assert not is_within("ab", "a")


def test_holders_come_nearest_first() -> None:
    assert list(above("a.b.c")) == ["a.b", "a", ""] and list(above("")) == []
    assert list(lineage("a.b")) == ["a.b", "a", ""] and list(lineage("")) == [""]
    assert innermost(["a", "a.b", "c"]) == ("a.b", "c") and innermost(["", "a"]) == ("a",)


def test_an_operator_goes_by_its_second_name() -> None:
    words = [operator_word(name) for name in ("aten.mm.default", "aten.mm.out", "mm", "aten.mm", "")]
    assert words == ["mm", "mm", "mm", "aten.mm", ""]


def test_many_names_are_cut_short() -> None:
    assert listed(["a", "b", "c"]) == "a, b, c" and listed([]) == ""
    assert listed(list("abcde")) == "a, b, c and 2 more"
    assert listed(list("abc"), 2, between="; ") == "a; b and 1 more"
    assert some(("", "a")) == "the model, a"
