"""An error is the same sentence, with the same figures, on either side of a process border."""

from __future__ import annotations

import pickle

import pytest

from explorer.errors import BadInput, ExplorerError, InvalidPolicy, OutOfMemory, nearest


def test_what_to_do_next_follows_what_was_found() -> None:
    assert str(BadInput("Found 3.", hint="Give 4.")) == "Found 3. Give 4."
    assert str(BadInput("Found 3.")) == "Found 3."


@pytest.mark.parametrize(
    "error", [InvalidPolicy("No block a.", hint="Name one."), OutOfMemory("Full.", asked_bytes=7, free_bytes=3)]
)
def test_an_error_travels_whole(error: ExplorerError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error) and str(arrived) == str(error) and vars(arrived) == vars(error)


def test_the_nearest_names_are_offered_and_none_that_is_far() -> None:
    assert nearest("laeyrs", ["layers", "head"]) == "Did you mean layers?"
    assert nearest("zzz", ["layers", "head"]) == ""
