"""What is new or gone in a model is told in few words."""

from __future__ import annotations

import pytest

from explorer.plan.policy.block_names import differences, shape_of


def test_numbers_count() -> None:
    assert shape_of(["", "stem", "blocks", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"]) == {
        "stem": 1, "blocks": 1, "blocks.*": 2, "blocks.*.mlp": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"blocks.*": 12, "blocks.*.mlp": 12}, {"blocks.*": 16, "blocks.*.mlp": 16}, "blocks.* are 16, and were 12"),
        ({"blocks.*": 2}, {"blocks.*": 1}, "blocks.* is 1, and were 2"),
        ({"norm": 1, "norm.a": 1}, {"adapter": 1}, "new: adapter; gone: norm"),
        ({"blocks.*": 1}, {"blocks.*": 3, "head": 1}, "blocks.* are 3, and was 1; new: head"),
        ({}, dict.fromkeys("abcdef", 1), "new: a, b, c, d and 2 more"),
    ],
)
def test_what_differs(before: dict[str, int], now: dict[str, int], words: str) -> None:
    assert differences(before, now) == words
