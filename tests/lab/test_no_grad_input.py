"""An input that needs no gradient."""

from __future__ import annotations

import pytest

from explorer.lab.no_grad_input import MISSING
from tests.lab.running import run, value


@pytest.mark.parametrize(
    ("source", "blocks", "reentrant", "n_missing"),
    [
        ("data", "all", "raised", 6),
        ("data", "first", "missing", 2),
        ("asked", "all", "bitwise equal", 0),
        ("asked", "first", "bitwise equal", 0),
        ("trained", "all", "bitwise equal", 0),
        ("trained", "first", "bitwise equal", 0),
    ],
)
def test_reentrant_needs_an_input_that_needs_a_gradient(
    source: str, blocks: str, reentrant: str, n_missing: int
) -> None:
    outcome = run("no-grad-input", input=source, blocks=blocks)
    assert outcome.row("non-reentrant").outcome == "bitwise equal"
    assert outcome.row("reentrant").outcome == reentrant
    assert value(outcome, "reentrant", MISSING) == n_missing
